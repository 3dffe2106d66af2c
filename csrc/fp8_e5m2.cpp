// fp8 with two bits of mantissa: fxcomp/compressors/fp8_e5m2.py, fp8.h and blocks.h have the rest.
#include "fp8.h"

constexpr SmallFloats<2, 15> kCodec{57344.0f};

FXCOMP_EXPORT void fxcomp_fp8_e5m2_encode(const float* bucket, float* residual, uint8_t* payload,
                                          const int64_t* segments, int64_t segment_count, int64_t block, int64_t*) {
    encode_blocks(kCodec, {segments, segment_count, block}, bucket, residual, payload, nullptr);
}

FXCOMP_EXPORT void fxcomp_fp8_e5m2_decode(const uint8_t* payloads, int64_t ranks, const int64_t* segments,
                                          int64_t segment_count, int64_t block, float* out) {
    decode_blocks(kCodec, {segments, segment_count, block}, payloads, ranks, out);
}
