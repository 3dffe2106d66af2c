"""Improve plans numerically, in csrc/search.cpp: buckets are spans of cells, prices are piecewise linear.

plan_search ─► engine ─► problem (the numbers)

Without built kernels, uniform plans are compared by simulation (`Simulated` in engine.py).
"""
