"""Gradient compressors: one file each, found by name with `parse_compressor`."""

from fxcomp.compressors.base import BadCompressor, Compressor
from fxcomp.compressors.bf16 import BF16
from fxcomp.compressors.catalogue import compressor_of, parse_compressor
from fxcomp.compressors.int4 import Int4
from fxcomp.compressors.int8 import Int8
from fxcomp.compressors.kernels import available as kernels_available
from fxcomp.compressors.sign import Sign
from fxcomp.compressors.topk import TopK

__all__ = [
    "BF16",
    "BadCompressor",
    "Compressor",
    "Int4",
    "Int8",
    "Sign",
    "TopK",
    "compressor_of",
    "kernels_available",
    "parse_compressor",
]
