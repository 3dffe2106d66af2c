"""Signs of values: the codec of `fxcomp/compressors/sign.py`."""

from fxcomp.compressors.triton.blocks import block_kernels, mean_magnitude
from fxcomp.compressors.triton.language import constexpr, jit, tl


@jit
def _scale(value, bucket, residual, state, size, MOST: constexpr, SHAPE: constexpr):
    return mean_magnitude(bucket, residual, size, SHAPE)


@jit
def _code(value, scale, drawn, MOST: constexpr):
    code = (value >= 0).to(tl.int32)
    return code, _value(code, scale, 1, MOST)


@jit
def _value(code, scale, BITS: constexpr, MOST: constexpr):
    return tl.where(code != 0, 1.0, -1.0) * scale  # -x would be 0 - x, which loses -0


encode, decode = block_kernels(_scale, _code, _value)
TAKES_PIECES = True
