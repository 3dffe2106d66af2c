// The values from a given magnitude on: fxcomp/compressors/threshold.py has the rule, survivors.h does the work.
#include "survivors.h"

FXCOMP_EXPORT void fxcomp_threshold_encode(const float* bucket, float* residual, uint8_t* payload, const void*,
                                           const void*, const int64_t* segments, const int64_t* ks,
                                           const int64_t* slots, int64_t segment_count, int64_t bits) {
    using namespace survivors;
    const auto threshold = static_cast<uint32_t>(bits);
    encode_segments({bucket, residual, payload, 0, 0, 0}, segments, ks, slots, segment_count,
                     [threshold](int64_t, const Segment& segment, Scratch& scratch) {
                         send(segment, threshold, scratch);
                     });
}
