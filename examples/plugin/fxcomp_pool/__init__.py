"""A compressor for fxcomp."""

from fxcomp_pool.pool import Pool

__all__ = ["Pool"]
