"""More compressors for fxcomp, one file each. No mode offers them; a plan or a strategy names them."""

from fxcomp_more.chunkmax import ChunkMax
from fxcomp_more.dgc import DGC
from fxcomp_more.fp8 import FP8E4M3, FP8E5M2
from fxcomp_more.randomk import RandomK
from fxcomp_more.shared_int8 import SharedInt8
from fxcomp_more.threshold import Threshold

__all__ = ["DGC", "FP8E4M3", "FP8E5M2", "ChunkMax", "RandomK", "SharedInt8", "Threshold"]
