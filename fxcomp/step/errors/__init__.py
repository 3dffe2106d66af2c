"""Measure what compressors lose of a running step's gradients, and let the plan follow it.

- look: one step's look at one family of compressors; applied: one step's check of what its plan really lost.
- error_looks: the table that looks and checks make, and when the next ones are due.
- adaptation: the plan that follows the table.
"""
