"""Judge the search: find the best plan of a small workload exactly.

oracle ─► space (buckets that may be) ─► labels (partial plans) ─► rest (what they still cost at least)

For any size, `fxcomp/search/bound.py` has a bound that no plan beats.
"""
