"""Improve plans in C++ (csrc/search.cpp). A bucket is a range of cells (joined gradients); prices are piecewise linear.

plan_search ─► engine ─► problem (the numbers)

Without built kernels, uniform plans are compared by simulation (`Simulated` in engine.py).
"""
