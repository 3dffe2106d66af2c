"""The search of csrc/search.cpp in Python, operation by operation: its specification, which tests compare it with.

descent (moves) ─► plan_clock (a step's time) ─► priced_parts ─► fxcomp/search/descent/problem.py (the numbers)
"""
