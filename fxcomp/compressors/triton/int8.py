"""Integers within -MOST..MOST: the codec of `fxcomp/compressors/int8.py` and int4.py."""

from fxcomp.compressors.triton.blocks import ROUND, block_kernels, clamped, largest_magnitude, quotient_of, whole_below
from fxcomp.compressors.triton.language import constexpr, jit, tl


@jit
def _scale(value, bucket, residual, state, size, MOST: constexpr, SHAPE: constexpr):
    return tl.div_rn(largest_magnitude(value), MOST)


@jit
def _code(value, scale, drawn, MOST: constexpr):
    quotient = clamped(quotient_of(value, scale), MOST)
    if drawn is None:
        shifted = quotient + ROUND  # the integer is in the lowest bits
        whole = shifted - ROUND
    else:
        whole = tl.minimum(whole_below(quotient + drawn), MOST)
        shifted = whole + ROUND
    return shifted.to(tl.int32, bitcast=True), whole * scale


@jit
def _value(code, scale, BITS: constexpr, MOST: constexpr):
    SIGN_BIT: constexpr = 1 << (BITS - 1)
    return ((code ^ SIGN_BIT) - SIGN_BIT).to(tl.float32) * scale


encode, decode = block_kernels(_scale, _code, _value)
TAKES_PIECES = True
