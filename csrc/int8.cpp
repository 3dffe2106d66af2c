// 8 bits a value and one fp32 scale a block: fxcomp/compressors/int8.py has the formulas, blocks.h the loops.
#include "blocks.h"

constexpr float kLevels = 127.0f;

FXCOMP_EXPORT void fxcomp_int8_encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                                      int64_t segment_count, int64_t block, int64_t* state) {
    const Cut cut{segments, segment_count, block};
    if (state != nullptr) {
        encode_blocks(Integers<8, true>{kLevels}, cut, bucket, residual, payload, state);
    } else {
        encode_blocks(Integers<8, false>{kLevels}, cut, bucket, residual, payload, nullptr);
    }
}

FXCOMP_EXPORT void fxcomp_int8_decode(const uint8_t* payloads, int64_t ranks, const int64_t* segments,
                                      int64_t segment_count, int64_t block, float* out) {
    decode_blocks(Integers<8, false>{kLevels}, {segments, segment_count, block}, payloads, ranks, out);
}
