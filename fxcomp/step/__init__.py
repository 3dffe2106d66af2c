"""Run a compiled step, verify and judge it, and change the plan that it follows."""
