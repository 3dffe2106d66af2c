"""Measured errors of compressors on each gradient, or errors on Gaussian values without a measurement.

- table: rows, columns, the average over measurements, and the file.
- measure: one measurement of one family of compressors.
- codecs: errors of quantisers and top-k.
"""

from fxcomp.error_tables.measure import measure
from fxcomp.error_tables.table import ASSUMED, FAMILIES, ErrorRow, ErrorTable, Rows, averaged, joined

__all__ = ["ASSUMED", "FAMILIES", "ErrorRow", "ErrorTable", "Rows", "averaged", "joined", "measure"]
