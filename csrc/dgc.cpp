// The values above a sampled threshold: fxcomp/compressors/dgc.py has the rules, survivors.h does the work.
//
// A sampled value costs a cache line of the gradient and one of the residual, so 1 % of the values cost a third of
// the full pass.
#include "random.h"
#include "survivors.h"

FXCOMP_EXPORT void fxcomp_dgc_encode(const float* bucket, float* residual, uint8_t* payload, int64_t* state,
                                     const void*, const int64_t* segments, const int64_t* ks, const int64_t* slots,
                                     int64_t segment_count, const int64_t* strides) {
    using namespace survivors;
    encode_segments({bucket, residual, payload, 0, 0, 0}, segments, ks, slots, segment_count,
                     [strides, state](int64_t index, const Segment& segment, Scratch& scratch) {
                         const uint32_t random = random_bits(stream_of(state + 2 * index), 0);
                         const Sample sample = take_sample(segment, strides[index], random, scratch);
                         send(segment, sample.threshold(), scratch, [sample] { return sample.lower_threshold(); });
                     });
    raise_steps(state, segment_count);
}
