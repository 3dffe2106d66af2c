// Whole numbers rounded at random and one L2 norm a block: fxcomp/compressors/qsgd.py has the formulas, blocks.h the
// loops.
#include "blocks.h"

template <int kBitsOfCode>
struct Norms : Integers<kBitsOfCode, true> {
    explicit Norms(int64_t levels) : Integers<kBitsOfCode, true>{static_cast<float>(levels)} {}

    template <bool kFeedback>
    FXCOMP_METHOD float scale_of(const float* bucket, const float* residual, int64_t size) const {
        return norm_of<kFeedback>(bucket, residual, size) / this->levels;
    }
};

// Calls work with the codec for so many levels.
template <class Work>
static void with_codec(int64_t levels, const Work& work) {
    if (levels == 1) {
        work(Norms<2>(levels));
    } else if (levels <= 7) {
        work(Norms<4>(levels));
    } else {
        work(Norms<8>(levels));
    }
}

FXCOMP_EXPORT void fxcomp_qsgd_encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                                      int64_t segment_count, int64_t block, int64_t* state, int64_t levels) {
    with_codec(levels, [=](auto codec) {
        encode_blocks(codec, {segments, segment_count, block}, bucket, residual, payload, state);
    });
}

FXCOMP_EXPORT void fxcomp_qsgd_decode(const uint8_t* payloads, int64_t ranks, const int64_t* segments,
                                      int64_t segment_count, int64_t block, float* out, int64_t levels) {
    with_codec(levels, [=](auto codec) {
        decode_blocks(codec, {segments, segment_count, block}, payloads, ranks, out);
    });
}
