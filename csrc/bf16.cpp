// The upper half of each fp32: fxcomp/compressors/casts.py has the formulas and the layout.
//
// One pass. Written out with integers, which every compiler vectorises, because C++17 has no bf16.
#include "common.h"
#include "threads.h"

FXCOMP_INLINE uint16_t round_to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > kInfinityBits ? (kNanBits >> 16) : rounded);
}

FXCOMP_INLINE float widen(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

FXCOMP_BODY void encode(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual,
                        uint16_t* FXCOMP_RESTRICT payload, int64_t begin, int64_t end) {
    if (residual == nullptr) {
        for (int64_t i = begin; i < end; ++i) payload[i] = round_to_bf16(bucket[i]);
        return;
    }
    for (int64_t i = begin; i < end; ++i) {
        const float value = bucket[i] + residual[i];
        const uint16_t half = round_to_bf16(value);
        const float left_out = value - widen(half);
        payload[i] = half;
        residual[i] = magnitude_bits(widen(half)) < kInfinityBits ? left_out : residual[i];
    }
}

template <bool kDivides>
FXCOMP_BODY void decode(const uint16_t* FXCOMP_RESTRICT payloads, int64_t ranks, int64_t elements,
                        float* FXCOMP_RESTRICT out, int64_t begin, int64_t end) {
    const bool first = kDivides && is_power_of_two(ranks);
    const float factor = mean_factor(ranks), divisor = static_cast<float>(ranks), each = first ? factor : 1.0f;
    for (int64_t start = begin; start < end; start += kTile) {
        const int64_t size = std::min(kTile, end - start);
        float* FXCOMP_RESTRICT tile = out + start;
        for (int64_t rank = 0; rank < ranks; ++rank) {
            const uint16_t* FXCOMP_RESTRICT half = payloads + rank * elements + start;
            if (rank == 0) {
                for (int64_t i = 0; i < size; ++i) tile[i] = kDivides ? widen(half[i]) * each : widen(half[i]);
            } else {
                for (int64_t i = 0; i < size; ++i) tile[i] += kDivides ? widen(half[i]) * each : widen(half[i]);
            }
        }
        if (ranks > 1 && !first) {
            for (int64_t i = 0; i < size; ++i) tile[i] = kDivides ? tile[i] / divisor : tile[i] * factor;
        }
    }
}

FXCOMP_EXPORT void fxcomp_bf16_encode(const float* bucket, float* residual, uint16_t* payload, const void*,
                                      const void*, int64_t elements) {
    in_parallel(elements, kGrain, [=](int64_t begin, int64_t end) {
        widest<encode>(bucket, residual, payload, begin, end);
    });
}

FXCOMP_EXPORT int32_t fxcomp_bf16_decode(const uint16_t* payloads, int64_t ranks, float* out, const void*, const void*,
                                         int64_t elements) {
    in_parallel(elements, kGrain / ranks,
                [=](int64_t begin, int64_t end) { widest<decode<false>>(payloads, ranks, elements, out, begin, end); });
    return 1;
}

// Values that are bf16 already: divided once, so the mean is correctly rounded if the sum is exact.

FXCOMP_EXPORT void fxcomp_exact_bf16_encode(const float* bucket, float* residual, uint16_t* payload, const void* state,
                                            const void* agreed, int64_t elements) {
    fxcomp_bf16_encode(bucket, residual, payload, state, agreed, elements);
}

FXCOMP_EXPORT int32_t fxcomp_exact_bf16_decode(const uint16_t* payloads, int64_t ranks, float* out, const void*,
                                               const void*, int64_t elements) {
    in_parallel(elements, kGrain / ranks,
                [=](int64_t begin, int64_t end) { widest<decode<true>>(payloads, ranks, elements, out, begin, end); });
    return 1;
}
