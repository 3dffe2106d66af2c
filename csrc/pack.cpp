// Copy a gradient to its place in a bucket, scaled on the way: fxcomp/compressors/pack.py. One pass.
#include "common.h"
#include "threads.h"

FXCOMP_BODY void scale_copy(const float* FXCOMP_RESTRICT source, float scale, float* FXCOMP_RESTRICT out, int64_t begin,
                            int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = source[i] * scale;
}

FXCOMP_EXPORT void fxcomp_scale_copy(const float* source, float scale, float* out, int64_t elements) {
    in_parallel(elements, kGrain,
                [=](int64_t begin, int64_t end) { widest<scale_copy>(source, scale, out, begin, end); });
}
