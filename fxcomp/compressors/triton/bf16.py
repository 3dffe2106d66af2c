"""The upper half of each fp32: the codec of `fxcomp/compressors/bf16.py`."""

from fxcomp.compressors.triton.casts import cast_kernels
from fxcomp.compressors.triton.language import jit, tl


@jit
def _code(value):
    bits = value.to(tl.uint32, bitcast=True)
    nearest = bits + 0x7FFF + ((bits >> 16) & 1)
    return (tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, nearest) >> 16).to(tl.int32)


@jit
def _value(code):
    return (code << 16).to(tl.float32, bitcast=True)


encode, decode = cast_kernels(_code, _value)
