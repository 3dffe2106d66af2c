"""Eight bits of floating point: the codec of `fxcomp/compressors/fp8_e4m3.py` and fp8_e5m2.py."""

from fxcomp.compressors.triton.blocks import block_kernels, clamped, largest_magnitude
from fxcomp.compressors.triton.language import constant, constexpr, jit, tl
from fxcomp.compressors.triton.small_floats import rounded, widened

E4M3_MOST = constant(448.0)  # the format's largest number, which tells it from e5m2
SMALLEST_SCALE = constant(2.0**-126)  # 1 / scale must be finite


@jit
def _scale(value, bucket, residual, state, size, MOST: constexpr, SHAPE: constexpr):
    scale = tl.div_rn(largest_magnitude(value), MOST)
    return tl.where(scale < SMALLEST_SCALE, 0.0, scale)


@jit
def _code(value, scale, drawn, MOST: constexpr):
    MANTISSA: constexpr = 3 if MOST == E4M3_MOST else 2
    BIAS: constexpr = 7 if MOST == E4M3_MOST else 15
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    bits = clamped(value * inverse, MOST).to(tl.int32, bitcast=True)
    code = rounded(bits & 0x7FFFFFFF, MANTISSA, BIAS) | ((bits >> 24) & 128)
    return code, _value(code, scale, 8, MOST)


@jit
def _value(code, scale, BITS: constexpr, MOST: constexpr):
    MANTISSA: constexpr = 3 if MOST == E4M3_MOST else 2
    BIAS: constexpr = 7 if MOST == E4M3_MOST else 15
    bits = widened(code & 127, MANTISSA, BIAS).to(tl.int32, bitcast=True) | ((code & 128) << 24)
    return bits.to(tl.float32, bitcast=True) * scale


encode, decode = block_kernels(_scale, _code, _value)
