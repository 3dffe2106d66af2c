"""The bits of `fxcomp/compressors/int4.py`: int8.py's kernels."""

from fxcomp.compressors.triton.int8 import decode, encode

__all__ = ["decode", "encode"]
