"""Measure compression errors on a running step's gradients, and adapt the plan to them.

- look: measurement of one compressor family in one step.
- error_looks: the error table, and the schedule of looks.
- adaptation: the plan that follows the table.
"""
