// A sign and a power of two for each value, and one scale a block: fxcomp/compressors/natural.py has the formulas,
// blocks.h the loops.
#include "blocks.h"

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint32_t kTooLarge = 0x7e800000u;  // 2^126

struct PowersOfTwo {
    static constexpr int kBits = 8;
    static constexpr bool kIsRandom = true;

    FXCOMP_METHOD float largest_value() const { return 1.0f; }

    template <bool kFeedback>
    FXCOMP_METHOD float scale_of(const float* bucket, const float* residual, int64_t size) const {
        const uint32_t largest = magnitude_bits(largest_magnitude<kFeedback>(bucket, residual, size));
        return float_of(largest < kTooLarge ? (largest & kInfinityBits) + (1u << 23) : kNanBits);
    }

    FXCOMP_METHOD float divisor_of(float scale) const { return 1.0f / scale; }

    FXCOMP_METHOD Coded encode(float value, float scale, float inverse, float u) const {
        const auto random = static_cast<uint32_t>(static_cast<int32_t>(u * 0x1p23f));
        const uint32_t power = (magnitude_bits(value * inverse) + random) & kInfinityBits;
        const uint32_t sign = bits_of(value) & kSignBit;
        return {(power >> 23) | (sign >> 24), float_of(power | sign) * scale};
    }

    FXCOMP_METHOD float decode(uint32_t code, float scale) const {
        return float_of(((code & 127u) << 23) | ((code & 128u) << 24)) * scale;
    }
};

FXCOMP_EXPORT void fxcomp_natural_encode(const float* bucket, float* residual, uint8_t* payload,
                                         const int64_t* segments, int64_t segment_count, int64_t block,
                                         int64_t* state) {
    encode_blocks(PowersOfTwo{}, {segments, segment_count, block}, bucket, residual, payload, state);
}

FXCOMP_EXPORT void fxcomp_natural_decode(const uint8_t* payloads, int64_t ranks, const int64_t* segments,
                                         int64_t segment_count, int64_t block, float* out) {
    decode_blocks(PowersOfTwo{}, {segments, segment_count, block}, payloads, ranks, out);
}
