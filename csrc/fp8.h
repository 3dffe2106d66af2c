// Eight bits of floating point a value and one fp32 scale a block: fxcomp/compressors/fp8.py has the formulas.
//
// The cast is written out with integers, which every compiler vectorises: C++17 has no float8.
#pragma once

#include "blocks.h"

constexpr float kSmallestScale = 0x1p-126f;  // 1 / scale must be finite

// A magnitude up to the format's end, rounded to nearest, ties to even: its code, and what that is. Adding a power of two
// whose last bit is worth one code rounds; it follows the magnitude's exponent down to the smallest normal number.
struct Rounded {
    uint32_t code;
    float value;
};

template <int kMantissa, int kBias>
FXCOMP_INLINE Rounded round_to_small_float(uint32_t magnitude) {
    constexpr int kDropped = 23 - kMantissa;
    constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;
    constexpr uint32_t kUp = static_cast<uint32_t>(kDropped) << 23;
    const uint32_t exponent = std::max(magnitude & kInfinityBits, kSmallestNormal);
    const float power = float_of(exponent + kUp);
    const float sum = float_of(magnitude) + power;
    const uint32_t code = bits_of(sum) - exponent + (exponent >> kDropped) - (kUp + (kSmallestNormal >> kDropped));
    return {code, sum - power};
}

template <int kMantissa, int kBias>
FXCOMP_INLINE float widen_small_float(uint32_t code) {
    constexpr uint32_t kUnit = static_cast<uint32_t>(128 - kBias - kMantissa) << 23;  // what the code 1 is worth
    const uint32_t normal = (code << (23 - kMantissa)) + (static_cast<uint32_t>(127 - kBias) << 23);
    const float evenly = static_cast<float>(static_cast<int32_t>(code)) * float_of(kUnit);
    return code < (1u << kMantissa) ? evenly : float_of(normal);
}

template <int kMantissa, int kBias>
struct SmallFloats {
    static constexpr int kBits = 8;
    static constexpr bool kIsRandom = false;

    float most;  // the format's largest number

    FXCOMP_METHOD float largest_value() const { return most; }

    template <bool kFeedback>
    FXCOMP_METHOD float scale_of(const float* bucket, const float* residual, int64_t size) const {
        const float scale = largest_magnitude<kFeedback>(bucket, residual, size) / most;
        return scale < kSmallestScale ? 0.0f : scale;
    }

    FXCOMP_METHOD float divisor_of(float scale) const { return scale > 0.0f ? 1.0f / scale : 0.0f; }

    FXCOMP_METHOD Coded encode(float value, float scale, float inverse, float) const {
        const float scaled = value * inverse;
        const uint32_t sign = bits_of(scaled) & 0x80000000u;
        const auto rounded = round_to_small_float<kMantissa, kBias>(std::min(magnitude_bits(scaled), bits_of(most)));
        return {rounded.code | (sign >> 24), float_of(bits_of(rounded.value) | sign) * scale};
    }

    FXCOMP_METHOD float decode(uint8_t code, float scale) const {
        const uint32_t sign = (static_cast<uint32_t>(code) & 128u) << 24;
        return float_of(bits_of(widen_small_float<kMantissa, kBias>(code & 127u)) | sign) * scale;
    }
};
