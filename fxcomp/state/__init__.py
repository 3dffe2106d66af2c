"""State that lasts from step to step: residuals and compressor states."""
