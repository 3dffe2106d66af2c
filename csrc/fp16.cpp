// IEEE half precision: fxcomp/compressors/casts.py has the formulas and the layout.
//
// One pass. Written out with integers, which every compiler vectorises, because C++17 has no fp16.
#include "common.h"
#include "stream.h"
#include "threads.h"

constexpr int kMantissa = 10;
constexpr int kBias = 15;

// A magnitude up to the format's end, rounded to nearest, ties to even: its code, and what that is. Adding a power of two
// whose last bit is worth one code rounds; it follows the magnitude's exponent down to the smallest normal number.
struct Rounded {
    uint32_t code;
    float value;
};

FXCOMP_INLINE Rounded round_to_half(uint32_t magnitude) {
    constexpr int kDropped = 23 - kMantissa;
    constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;
    constexpr uint32_t kUp = static_cast<uint32_t>(kDropped) << 23;
    const uint32_t exponent = std::max(magnitude & kInfinityBits, kSmallestNormal);
    const float power = float_of(exponent + kUp);
    const float sum = float_of(magnitude) + power;
    const uint32_t code = bits_of(sum) - exponent + (exponent >> kDropped) - (kUp + (kSmallestNormal >> kDropped));
    return {code, sum - power};
}

FXCOMP_INLINE float widen_half(uint32_t code) {
    constexpr uint32_t kUnit = static_cast<uint32_t>(128 - kBias - kMantissa) << 23;  // what the code 1 is worth
    const uint32_t normal = (code << (23 - kMantissa)) + (static_cast<uint32_t>(127 - kBias) << 23);
    const float evenly = static_cast<float>(static_cast<int32_t>(code)) * float_of(kUnit);
    return code < (1u << kMantissa) ? evenly : float_of(normal);
}

constexpr uint32_t kOverflow = 0x477ff000u;  // 65520, from which on rounding gives inf

// The code, and what it is worth where fp16 can hold the value.
FXCOMP_INLINE Rounded round_to_fp16(float value) {
    const uint32_t magnitude = magnitude_bits(value), sign = bits_of(value) & 0x80000000u;
    const Rounded finite = round_to_half(magnitude);
    const uint32_t other = magnitude > kInfinityBits ? 0x7e00u : 0x7c00u;
    return {(magnitude < kOverflow ? finite.code : other) | (sign >> 16), float_of(bits_of(finite.value) | sign)};
}

FXCOMP_INLINE float widen_fp16(uint16_t half) {
    const uint32_t code = half & 0x7fffu, sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t finite = bits_of(widen_half(code));
    return float_of((code < 0x7c00u ? finite : (code << 13) | kInfinityBits) | sign);
}

template <bool kFeedback>
FXCOMP_BODY void encode(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual,
                        uint16_t* FXCOMP_RESTRICT payload, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const float value = compensated<kFeedback>(bucket, residual, i);
        const Rounded half = round_to_fp16(value);
        payload[i] = static_cast<uint16_t>(half.code);
        if (kFeedback) residual[i] = magnitude_bits(value) < kOverflow ? value - half.value : residual[i];
    }
}

template <bool kDivides>
FXCOMP_INLINE void decode_tile(const uint16_t* FXCOMP_RESTRICT payloads, int64_t ranks, int64_t elements,
                               float* FXCOMP_RESTRICT tile, int64_t size) {
    const bool first = kDivides && is_power_of_two(ranks);
    const float each = first ? mean_factor(ranks) : 1.0f;
    for (int64_t i = 0; i < size; ++i) tile[i] = kDivides ? widen_fp16(payloads[i]) * each : widen_fp16(payloads[i]);
    for (int64_t rank = 1; rank < ranks; ++rank) {
        const uint16_t* FXCOMP_RESTRICT const half = payloads + rank * elements;
        for (int64_t i = 0; i < size; ++i) tile[i] += kDivides ? widen_fp16(half[i]) * each : widen_fp16(half[i]);
    }
    if (ranks == 1 || first) return;
    const float factor = mean_factor(ranks), divisor = static_cast<float>(ranks);
    for (int64_t i = 0; i < size; ++i) tile[i] = kDivides ? tile[i] / divisor : tile[i] * factor;
}

template <bool kStream, bool kDivides>
FXCOMP_BODY void decode(const uint16_t* payloads, int64_t ranks, int64_t elements, float* out, int64_t begin,
                        int64_t end) {
    LineWriter<kTile> writer;
    if (kStream) start_lines(writer, out + begin);
    for (int64_t start = begin; start < end; start += kTile) {
        const int64_t size = std::min(kTile, end - start);
        decode_tile<kDivides>(payloads + start, ranks, elements, kStream ? next_values(writer) : out + start, size);
        if (kStream) commit_values(writer, size);
    }
    if (kStream) finish_lines(writer);
}

FXCOMP_EXPORT void fxcomp_fp16_encode(const float* bucket, float* residual, uint16_t* payload, const void*,
                                      const void*, int64_t elements) {
    if (residual != nullptr) {
        in_parallel(elements, kGrain,
                    [=](int64_t begin, int64_t end) { widest<encode<true>>(bucket, residual, payload, begin, end); });
    } else {
        in_parallel(elements, kGrain,
                    [=](int64_t begin, int64_t end) { widest<encode<false>>(bucket, residual, payload, begin, end); });
    }
}

template <bool kDivides>
inline int32_t decode_all(const uint16_t* payloads, int64_t ranks, float* out, int64_t elements) {
    if (kCanStream && elements >= kStreamedElements) {
        in_parallel(elements, kGrain / ranks, [=](int64_t begin, int64_t end) {
            widest<decode<true, kDivides>>(payloads, ranks, elements, out, begin, end);
        });
    } else {
        in_parallel(elements, kGrain / ranks, [=](int64_t begin, int64_t end) {
            widest<decode<false, kDivides>>(payloads, ranks, elements, out, begin, end);
        });
    }
    return 1;
}

FXCOMP_EXPORT int32_t fxcomp_fp16_decode(const uint16_t* payloads, int64_t ranks, float* out, const void*, const void*,
                                         int64_t elements) {
    return decode_all<false>(payloads, ranks, out, elements);
}

// Values that are fp16 already: divided once, so the mean is correctly rounded if the sum is exact.

FXCOMP_EXPORT void fxcomp_exact_fp16_encode(const float* bucket, float* residual, uint16_t* payload, const void* state,
                                            const void* agreed, int64_t elements) {
    fxcomp_fp16_encode(bucket, residual, payload, state, agreed, elements);
}

FXCOMP_EXPORT int32_t fxcomp_exact_fp16_decode(const uint16_t* payloads, int64_t ranks, float* out, const void*,
                                               const void*, int64_t elements) {
    return decode_all<true>(payloads, ranks, out, elements);
}
