"""Round fp32 to fewer bits and widen again, with integers: the same bits on every GPU and in the interpreter.

The formats differ in the bits of their mantissa and in the bias of their exponent; csrc/fp8.h has the same formulas.
"""

from __future__ import annotations

from fxcomp.compressors.triton.language import constexpr, jit, tl


@jit
def rounded(magnitude, MANTISSA: constexpr, BIAS: constexpr):
    """Return the code of a magnitude's bits below the format's end, to nearest, ties to even.

    Below the smallest normal number codes are evenly spaced: adding a power of two whose last bit is worth one code
    rounds to them.
    """
    DROPPED: constexpr = 23 - MANTISSA
    MAGIC: constexpr = (128 - BIAS - MANTISSA + 23) << 23
    nearest = magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = (nearest >> DROPPED) - ((127 - BIAS) << MANTISSA)
    magic = tl.full(magnitude.shape, MAGIC, tl.int32).to(tl.float32, bitcast=True)
    evenly = (magnitude.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - MAGIC
    return tl.where(magnitude < ((128 - BIAS) << 23), evenly, normal)


@jit
def widened(code, MANTISSA: constexpr, BIAS: constexpr):
    """Return the magnitude that a code below the format's end stands for, fp32."""
    UNIT: constexpr = (128 - BIAS - MANTISSA) << 23
    normal = ((code << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    unit = tl.full(code.shape, UNIT, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(code < (1 << MANTISSA), code.to(tl.float32) * unit, normal)
