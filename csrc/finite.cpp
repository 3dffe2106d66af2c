// Whether all values are finite: fxcomp/runtime/runtime.py asks it of what arrived, before parameters change.
//
// One pass that reads and writes nothing; it stops at the first tile with something that is not finite.
#include <atomic>

#include "common.h"
#include "threads.h"

FXCOMP_BODY uint32_t largest_magnitude(const float* FXCOMP_RESTRICT values, int64_t begin, int64_t end) {
    uint32_t largest = 0;
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, magnitude_bits(values[i]));
    return largest;
}

FXCOMP_EXPORT int32_t fxcomp_all_finite(const float* values, int64_t elements) {
    constexpr int64_t kRun = 1 << 14;
    std::atomic<bool> finite{true};
    in_parallel(ceil_divide(elements, kRun), kGrain / kRun, [&](int64_t begin, int64_t end) {
        for (int64_t run = begin; run < end && finite.load(std::memory_order_relaxed); ++run) {
            const int64_t start = run * kRun;
            const int64_t stop = std::min(elements, start + kRun);
            if (widest<largest_magnitude>(values, start, stop) >= kInfinityBits) finite = false;
        }
    });
    return finite;
}
