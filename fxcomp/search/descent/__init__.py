"""Improve plans by numbers alone: buckets are spans of cells, prices are lines; csrc/search.cpp takes the same steps.

plan_search ─► engine ─► descent (moves) ─► plan_clock (a step's time) ─► priced_parts ─► problem (the numbers)
"""
