"""The bits of `fxcomp/compressors/fp8_e5m2.py`: fp8.py's kernels."""

from fxcomp.compressors.triton.fp8 import decode, encode

__all__ = ["decode", "encode"]
