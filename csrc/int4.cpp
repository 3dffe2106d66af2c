// 4 bits a value and one fp32 scale a block: fxcomp/compressors/int4.py has the formulas, blocks.h the loops.
#include "integers.h"

constexpr Integers<4, false> kNearest{7.0f};
constexpr Integers<4, true> kAtRandom{7.0f};

FXCOMP_BLOCK_KERNELS(int4, kNearest, kAtRandom)
