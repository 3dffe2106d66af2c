// One bit a value and one fp32 scale a block: fxcomp/compressors/sign.py has the formulas, blocks.h the loops.
#include "blocks.h"

struct Signs {
    static constexpr int kBits = 1;
    static constexpr bool kIsRandom = false;

    FXCOMP_METHOD float largest_value() const { return 1.0f; }

    template <bool kFeedback>
    FXCOMP_METHOD float scale_of(const float* bucket, const float* residual, int64_t size) const {
        return mean_magnitude<kFeedback>(bucket, residual, size);
    }

    FXCOMP_METHOD float divisor_of(float) const { return 1.0f; }

    FXCOMP_METHOD Coded encode(float value, float scale, float, float) const {
        const uint32_t code = value >= 0.0f;
        return {code, decode(code, scale)};
    }

    FXCOMP_METHOD float decode(uint32_t code, float scale) const {
        return float_of(bits_of(scale) ^ ((code ^ 1u) << 31));
    }
};

FXCOMP_BLOCK_KERNELS(sign, Signs{}, Signs{})
