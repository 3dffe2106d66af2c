// -1, 0 or 1 for each value and one scale a block: fxcomp/compressors/terngrad.py has the formulas, blocks.h the loops.
#include "blocks.h"

struct Ternary : Integers<2, true> {
    float clip;

    explicit Ternary(float most) : Integers<2, true>{1.0f}, clip(most) {}

    template <bool kFeedback>
    FXCOMP_METHOD float scale_of(const float* bucket, const float* residual, int64_t size) const {
        const float largest = largest_magnitude<kFeedback>(bucket, residual, size);
        if (clip == 0.0f || magnitude_bits(largest) >= kInfinityBits) return largest;
        return std::min(largest, root_mean_square<kFeedback>(bucket, residual, size) * clip);
    }
};

FXCOMP_EXPORT void fxcomp_terngrad_encode(const float* bucket, float* residual, uint8_t* payload,
                                          const int64_t* segments, int64_t segment_count, int64_t block,
                                          int64_t* state, float clip) {
    encode_blocks(Ternary(clip), {segments, segment_count, block}, bucket, residual, payload, state);
}

FXCOMP_EXPORT void fxcomp_terngrad_decode(const uint8_t* payloads, int64_t ranks, const int64_t* segments,
                                          int64_t segment_count, int64_t block, float* out, float) {
    decode_blocks(Ternary(0.0f), {segments, segment_count, block}, payloads, ranks, out);
}
