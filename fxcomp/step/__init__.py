"""Run a compiled step, verify and time it, and change its plan."""
