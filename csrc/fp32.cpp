// fp32 as it is: fxcomp/compressors/casts.py has the formula of the mean.
#include "common.h"
#include "threads.h"

FXCOMP_BODY void decode(const float* FXCOMP_RESTRICT payloads, int64_t ranks, int64_t elements,
                        float* FXCOMP_RESTRICT out, int64_t begin, int64_t end) {
    const bool first = is_power_of_two(ranks);
    const float divisor = static_cast<float>(ranks), each = first ? mean_factor(ranks) : 1.0f;
    for (int64_t start = begin; start < end; start += kTile) {
        const int64_t size = std::min(kTile, end - start);
        float* FXCOMP_RESTRICT tile = out + start;
        for (int64_t i = 0; i < size; ++i) tile[i] = payloads[start + i] * each;
        for (int64_t rank = 1; rank < ranks; ++rank) {
            const float* FXCOMP_RESTRICT other = payloads + rank * elements + start;
            for (int64_t i = 0; i < size; ++i) tile[i] += other[i] * each;
        }
        if (!first) {
            for (int64_t i = 0; i < size; ++i) tile[i] /= divisor;
        }
    }
}

FXCOMP_EXPORT void fxcomp_exact_fp32_encode(const float* bucket, const float*, float* payload, const void*, const void*,
                                            int64_t elements) {
    in_parallel(elements, kGrain,
                [=](int64_t begin, int64_t end) { std::copy(bucket + begin, bucket + end, payload + begin); });
}

FXCOMP_EXPORT int32_t fxcomp_exact_fp32_decode(const float* payloads, int64_t ranks, float* out, const void*,
                                               const void*, int64_t elements) {
    in_parallel(elements, kGrain / ranks,
                [=](int64_t begin, int64_t end) { widest<decode>(payloads, ranks, elements, out, begin, end); });
    return 1;
}
