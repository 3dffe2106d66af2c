"""Four levels at ±1/2 and ±3/2 of a block's scale: the codec of `fxcomp/compressors/int2.py`."""

from fxcomp.compressors.triton.blocks import block_kernels, largest_magnitude, mean_magnitude, quotient_of, whole_below
from fxcomp.compressors.triton.language import constexpr, jit, tl


@jit
def _scale(value, bucket, residual, state, size, MOST: constexpr, SHAPE: constexpr):
    if state is None:
        scale = mean_magnitude(bucket, residual, size, SHAPE) * MOST
    else:
        scale = tl.div_rn(largest_magnitude(value), MOST)
    return scale


@jit
def _code(value, scale, drawn, MOST: constexpr):
    if drawn is None:
        code = tl.where(tl.abs(value) >= scale, 3, 2) ^ tl.where(value < 0, 3, 0)
    else:
        code = whole_below(quotient_of(value, scale) + MOST + drawn).to(tl.int32)
        code = tl.minimum(tl.maximum(code, 0), 3)
    return code, _value(code, scale, 2, MOST)


@jit
def _value(code, scale, BITS: constexpr, MOST: constexpr):
    return (code.to(tl.float32) - MOST) * scale


encode, decode = block_kernels(_scale, _code, _value)
TAKES_PIECES = True
