"""Check a compressor, built-in or custom: call `check_compressor(MyCompressor())` in a test of your package."""

from fxcomp.testing.checks import CHECKS, check_compressor
from fxcomp.testing.rounds import Replica, Shard, average, average_in_two_shots, replicas_of, shards_of
from fxcomp.testing.samples import SAMPLES

__all__ = [
    "CHECKS",
    "SAMPLES",
    "Replica",
    "Shard",
    "average",
    "average_in_two_shots",
    "check_compressor",
    "replicas_of",
    "shards_of",
]
