"""Gradient compressors: one file each, found by name with `parse_compressor`.

- facts, base: declarations, reference implementation, and in-place `encode` and `decode`.
- inputs: arguments and their checks.
- catalogue, operators: names, ops and text form.
- kernels, triton/: compiled kernels with bit-identical results.
- randomness: random numbers from counters.
- gaussian_error: errors on Gaussian values.
- casts, block_codes, places, survivors, tail_fits: shared code.
- examples: one instance of each compressor.
"""

from fxcomp.compressors.base import Compressed, Compressor
from fxcomp.compressors.casts import BF16, FP16, CastCompressor, ExactBF16, ExactFP16, ExactFP32
from fxcomp.compressors.catalogue import CATALOGUE, compressor_of, parse_compressor, register
from fxcomp.compressors.cmax import CMax
from fxcomp.compressors.facts import Bias, Facts, Feedback, Parameter, ProposalReduction
from fxcomp.compressors.inputs import DecoderInput, EncoderInput
from fxcomp.compressors.int2 import Int2
from fxcomp.compressors.int4 import Int4
from fxcomp.compressors.int8 import Int8
from fxcomp.compressors.kernels import available as kernels_available
from fxcomp.compressors.powersgd import PowerSGD
from fxcomp.compressors.sidco import Sidco
from fxcomp.compressors.sign import Sign
from fxcomp.compressors.topk import TopK

__all__ = [
    "BF16",
    "CATALOGUE",
    "FP16",
    "Bias",
    "CMax",
    "CastCompressor",
    "Compressed",
    "Compressor",
    "DecoderInput",
    "EncoderInput",
    "ExactBF16",
    "ExactFP16",
    "ExactFP32",
    "Facts",
    "Feedback",
    "Int2",
    "Int4",
    "Int8",
    "Parameter",
    "PowerSGD",
    "ProposalReduction",
    "Sidco",
    "Sign",
    "TopK",
    "compressor_of",
    "kernels_available",
    "parse_compressor",
    "register",
]
