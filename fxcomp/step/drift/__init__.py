"""Notice that a running step costs something else than predicted, say what, and put the cost table right.

step timed ─► Watch ─► Sheet.measured_us ─► shared over ranks ─► judge ─► Finding ─► corrected CostTable
"""
