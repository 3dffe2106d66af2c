"""Check a compressor, ours or your own: `check_compressor(MyCompressor())` in a test of your package."""

from fxcomp.testing.checks import CHECKS, check_compressor
from fxcomp.testing.rounds import Replica, average, replicas_of
from fxcomp.testing.samples import SAMPLES

__all__ = ["CHECKS", "SAMPLES", "Replica", "average", "check_compressor", "replicas_of"]
