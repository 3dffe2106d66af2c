"""Measure what compressors lose of each gradient; where nothing was measured, assume Gaussian values.

- table: the numbers, and `error_of`, which says whether they are measured.
- columns: which entries there are, and which serves a compressor.
- measure: one look at gradients and residuals; codecs: what quantisers lose.
- families: the mean over looks, and of families that are measured at different steps.
"""

from fxcomp.error_tables.columns import STANDARD, Columns
from fxcomp.error_tables.families import families, joined, scaled, smoothed
from fxcomp.error_tables.measure import measure
from fxcomp.error_tables.table import ASSUMED, Error, ErrorRow, ErrorSource, ErrorTable, legal

__all__ = [
    "ASSUMED",
    "STANDARD",
    "Columns",
    "Error",
    "ErrorRow",
    "ErrorSource",
    "ErrorTable",
    "families",
    "joined",
    "legal",
    "measure",
    "scaled",
    "smoothed",
]
