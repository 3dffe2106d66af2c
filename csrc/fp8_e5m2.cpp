// fp8 with two bits of mantissa: fxcomp/compressors/fp8.py, fp8.h and blocks.h have the rest.
#include "fp8.h"

constexpr SmallFloats<2, 15> kCodec{57344.0f};

FXCOMP_BLOCK_KERNELS(fp8_e5m2, kCodec, kCodec)
