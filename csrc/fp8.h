// Eight bits of floating point a value and one fp32 scale a block: fxcomp/compressors/fp8.py has the formulas.
//
// The cast is written out with integers, which every compiler vectorises: C++17 has no float8.
#pragma once

#include "blocks.h"

constexpr float kSmallestScale = 0x1p-126f;  // 1 / scale must be finite

// Rounds a magnitude below the format's end to nearest, ties to even. Below the smallest normal number the codes are
// evenly spaced: adding a power of two whose last bit is worth one code rounds to them.
template <int kMantissa, int kBias>
FXCOMP_INLINE uint32_t round_to_small_float(uint32_t magnitude) {
    constexpr int kDropped = 23 - kMantissa;
    constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;
    constexpr uint32_t kMagic = static_cast<uint32_t>(128 - kBias - kMantissa + 23) << 23;
    const uint32_t rounded = magnitude + ((1u << (kDropped - 1)) - 1u) + ((magnitude >> kDropped) & 1u);
    const uint32_t normal = (rounded >> kDropped) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
    const uint32_t evenly = bits_of(float_of(magnitude) + float_of(kMagic)) - kMagic;
    return magnitude < kSmallestNormal ? evenly : normal;
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

    template <bool kFeedback>
    FXCOMP_METHOD float scale_of(const float* bucket, const float* residual, int64_t size) const {
        const float scale = largest_magnitude<kFeedback>(bucket, residual, size) / most;
        return scale < kSmallestScale ? 0.0f : scale;
    }

    FXCOMP_METHOD float divisor_of(float scale) const { return scale > 0.0f ? 1.0f / scale : 0.0f; }

    FXCOMP_METHOD Coded encode(float value, float scale, float inverse, float) const {
        const float scaled = clamp_to(value * inverse, most);
        const uint32_t sign = (bits_of(scaled) >> 24) & 128u;
        const uint32_t code = round_to_small_float<kMantissa, kBias>(magnitude_bits(scaled)) | sign;
        return {code, decode(static_cast<uint8_t>(code), scale)};
    }

    FXCOMP_METHOD float decode(uint8_t code, float scale) const {
        const uint32_t sign = (static_cast<uint32_t>(code) & 128u) << 24;
        return float_of(bits_of(widen_small_float<kMantissa, kBias>(code & 127u)) | sign) * scale;
    }
};
