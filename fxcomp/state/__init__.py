"""Keep what lasts from step to step: residuals, compressors' memory; feed, hand over and save it."""
