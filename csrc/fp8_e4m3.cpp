// fp8 with three bits of mantissa: fxcomp/compressors/fp8.py, fp8.h and blocks.h have the rest.
#include "fp8.h"

constexpr SmallFloats<3, 7> kCodec{448.0f};

FXCOMP_BLOCK_KERNELS(fp8_e4m3, kCodec, kCodec)
