"""Price compute, collectives and compressors, and simulate the step that they make."""
