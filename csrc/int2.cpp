// Two bits a value and one fp32 scale a block: fxcomp/compressors/int2.py has the formulas, blocks.h the loops.
#include "integers.h"

constexpr float kOuter = 1.5f;  // the outer level, in units of the scale

template <bool kStochastic>
struct Quarters {
    static constexpr int kBits = 2;
    static constexpr bool kIsRandom = kStochastic;

    FXCOMP_METHOD float largest_value() const { return kOuter; }

    template <bool kFeedback>
    FXCOMP_METHOD float scale_of(const float* bucket, const float* residual, int64_t size) const {
        if (kStochastic) return largest_magnitude<kFeedback>(bucket, residual, size) / kOuter;
        return mean_magnitude<kFeedback>(bucket, residual, size) * 1.5f;
    }

    FXCOMP_METHOD float divisor_of(float scale) const { return scale > 0.0f ? scale : 1.0f; }

    FXCOMP_METHOD Coded encode(float value, float scale, float divisor, float u) const {
        if (kStochastic) {
            int32_t code = floor_of(value / divisor + kOuter + u);
            code = code < 0 ? 0 : code;
            code = code > 3 ? 3 : code;
            return {static_cast<uint32_t>(code), (static_cast<float>(code) - kOuter) * scale};
        }
        const bool is_outer = float_of(magnitude_bits(value)) >= scale;
        const uint32_t code = (is_outer ? 3u : 2u) ^ (value < 0.0f ? 3u : 0u);
        return {code, decode(static_cast<uint8_t>(code), scale)};
    }

    FXCOMP_METHOD float decode(uint8_t code, float scale) const {
        return (static_cast<float>(static_cast<int8_t>(code)) - kOuter) * scale;
    }
};

FXCOMP_BLOCK_KERNELS(int2, Quarters<false>{}, Quarters<true>{})
