"""Measure a job and decide on its plan, all ranks together."""
