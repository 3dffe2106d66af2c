"""Commands of `fxcomp`, one per file."""
