// The codec of int8 and int4 for blocks.h: whole numbers of a block's scale. int2 rounds as it does.
#pragma once

#include "blocks.h"

// To nearest, ties to even: adding 1.5 * 2^23 leaves the whole number in the low bits. For magnitudes below 2^22.
FXCOMP_INLINE int32_t round_of(float value) {
    constexpr float kRound = 12582912.0f;
    return static_cast<int32_t>(bits_of(value + kRound) - bits_of(kRound));
}

// Integers are clamped, not floats: that is two instructions, where GCC makes masks for a float that may be NaN.
FXCOMP_INLINE int32_t clamp_to(int32_t value, int32_t limit) { return std::min(std::max(value, -limit), limit); }

// Exact for what an int32 holds, and vectorises everywhere.
FXCOMP_INLINE int32_t floor_of(float value) {
    const auto towards_zero = static_cast<int32_t>(value);
    return towards_zero - (static_cast<float>(towards_zero) > value ? 1 : 0);
}

// v / scale rounded to a whole number within -levels..levels, to nearest or at random, in two's complement.
template <int kBitsOfCode, bool kStochastic>
struct Integers {
    static constexpr int kBits = kBitsOfCode;
    static constexpr bool kIsRandom = kStochastic;
    static constexpr uint8_t kSignBit = 1 << (kBits - 1);

    float levels;

    FXCOMP_METHOD float largest_value() const { return levels; }

    template <bool kFeedback>
    FXCOMP_METHOD float scale_of(const float* bucket, const float* residual, int64_t size) const {
        return largest_magnitude<kFeedback>(bucket, residual, size) / levels;
    }

    FXCOMP_METHOD float divisor_of(float scale) const { return scale > 0.0f ? scale : 1.0f; }

    FXCOMP_METHOD Coded encode(float value, float scale, float divisor, float u) const {
        const float quotient = value / divisor;
        const int32_t rounded = kStochastic ? floor_of(quotient + u) : round_of(quotient);
        const int32_t whole = clamp_to(rounded, static_cast<int32_t>(levels));
        return {static_cast<uint32_t>(whole) & (2 * kSignBit - 1), static_cast<float>(whole) * scale};
    }

    FXCOMP_METHOD float decode(uint8_t code, float scale) const {
        return static_cast<float>(static_cast<int8_t>((code ^ kSignBit) - kSignBit)) * scale;
    }
};
