// 8 bits a value and one fp32 scale a block: fxcomp/compressors/int8.py has the formulas, blocks.h the loops.
#include "integers.h"

constexpr Integers<8, false> kNearest{127.0f};
constexpr Integers<8, true> kAtRandom{127.0f};

FXCOMP_BLOCK_KERNELS(int8, kNearest, kAtRandom)
