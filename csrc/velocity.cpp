// A rank's own momentum: fxcomp/graph/ops.py has the formulas, fxcomp/runtime/runtime.py calls these. One pass each.
#include "common.h"
#include "threads.h"

FXCOMP_BODY void accumulate(float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT velocity, float momentum,
                            int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const float old = velocity[i], next = old * momentum + bucket[i];
        bucket[i] = next;
        velocity[i] = magnitude_bits(next) < kInfinityBits ? next : old;
    }
}

// Few values were sent: most runs of a cache line or two have none, and are only read.
FXCOMP_BODY void mask(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT velocity,
                      const float* FXCOMP_RESTRICT residual, int64_t begin, int64_t end) {
    constexpr int64_t kRun = 32;
    for (int64_t start = begin; start < end; start += kRun) {
        const int64_t stop = std::min(start + kRun, end);
        uint32_t sent = 0;
        for (int64_t i = start; i < stop; ++i) sent |= residual[i] == 0.0f ? 1u : 0u;
        if (sent == 0) continue;
        for (int64_t i = start; i < stop; ++i) {
            const bool forget = residual[i] == 0.0f && magnitude_bits(bucket[i]) < kInfinityBits;
            velocity[i] = forget ? 0.0f : velocity[i];
        }
    }
}

FXCOMP_EXPORT void fxcomp_accumulate(float* bucket, float* velocity, float momentum, int64_t elements) {
    in_parallel(elements, kGrain,
                [=](int64_t begin, int64_t end) { widest<accumulate>(bucket, velocity, momentum, begin, end); });
}

FXCOMP_EXPORT void fxcomp_mask_velocity(const float* bucket, float* velocity, const float* residual,
                                        int64_t elements) {
    in_parallel(elements, kGrain,
                [=](int64_t begin, int64_t end) { widest<mask>(bucket, velocity, residual, begin, end); });
}
