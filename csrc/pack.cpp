// Copy a gradient to its place in a bucket, scaled on the way: fxcomp/compressors/pack.py. One pass.
#include "common.h"

FXCOMP_KERNEL void fxcomp_scale_copy(const float* FXCOMP_RESTRICT source, float scale, float* FXCOMP_RESTRICT out,
                                     int64_t elements) {
    for (int64_t i = 0; i < elements; ++i) out[i] = source[i] * scale;
}
