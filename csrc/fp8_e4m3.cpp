// fp8 with three bits of mantissa: fxcomp/compressors/fp8_e4m3.py, fp8.h and blocks.h have the rest.
#include "fp8.h"

constexpr SmallFloats<3, 7> kCodec{448.0f};

FXCOMP_EXPORT void fxcomp_fp8_e4m3_encode(const float* bucket, float* residual, uint8_t* payload,
                                          const int64_t* segments, int64_t segment_count, int64_t block, int64_t*) {
    encode_blocks(kCodec, {segments, segment_count, block}, bucket, residual, payload, nullptr);
}

FXCOMP_EXPORT void fxcomp_fp8_e4m3_decode(const uint8_t* payloads, int64_t ranks, const int64_t* segments,
                                          int64_t segment_count, int64_t block, float* out) {
    decode_blocks(kCodec, {segments, segment_count, block}, payloads, ranks, out);
}
