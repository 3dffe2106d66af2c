"""Notice that a running step costs something else than predicted, say what, and correct the cost table.

timed step ─► Watch ─► PredictedCosts.measured_us ─► shared over ranks ─► judge ─► Finding ─► corrected CostTable
"""
