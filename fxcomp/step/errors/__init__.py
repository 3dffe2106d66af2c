"""Measure what compressors lose of a running step's gradients, and let the plan follow it.

- look: one step's look at one family of compressors.
- error_looks: the table that looks make, and when the next one is due.
- adaptation: the plan that follows the table.
"""
