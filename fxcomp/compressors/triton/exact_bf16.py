"""exact_bf16: bf16's kernels, but the sum is divided once by the number of ranks."""

from fxcomp.compressors.triton.bf16 import bf16_code, bf16_value, cast_kernels

encode, decode = cast_kernels(bf16_code, bf16_value, divides=True)
