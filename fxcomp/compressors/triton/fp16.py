"""Half precision: the codec of `fxcomp/compressors/fp16.py`."""

from fxcomp.compressors.triton.casts import cast_kernels
from fxcomp.compressors.triton.language import constant, jit, tl
from fxcomp.compressors.triton.small_floats import rounded, widened
from fxcomp.compressors.triton.tiles import INFINITY

OVERFLOW = constant(0x477FF000)  # 65520, from which on rounding gives infinity


@jit
def _code(value):
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    not_finite = tl.where(magnitude > INFINITY, 0x7E00, 0x7C00)
    return tl.where(magnitude < OVERFLOW, rounded(magnitude, 10, 15), not_finite) | ((bits >> 16) & 0x8000)


@jit
def _value(code):
    magnitude = code & 0x7FFF
    finite = widened(magnitude, 10, 15).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < 0x7C00, finite, (magnitude << 13) | INFINITY) | ((code & 0x8000) << 16)
    return bits.to(tl.float32, bitcast=True)


encode, decode = cast_kernels(_code, _value)
