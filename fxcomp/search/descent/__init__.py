"""Improve plans by numbers alone, in csrc/search.cpp: buckets are spans of cells, prices are lines.

plan_search ─► engine ─► problem (the numbers)

Where the kernels are not built, plans of one strategy everywhere are compared by simulation (`Simulated` in engine.py).
"""
