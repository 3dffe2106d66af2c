"""Measure what compressors lose of each gradient; where nothing was measured, assume Gaussian values.

- table: the columns and the numbers, the mean over looks, and the file.
- measure: one look at one family of compressors; codecs: what quantisers and selections lose.
"""

from fxcomp.error_tables.measure import measure
from fxcomp.error_tables.table import ASSUMED, FAMILIES, ErrorRow, ErrorTable, Rows, averaged, joined

__all__ = ["ASSUMED", "FAMILIES", "ErrorRow", "ErrorTable", "Rows", "averaged", "joined", "measure"]
