"""Prices of compute, collectives and compressors, and the step's simulator."""
