"""Keep what lasts from step to step: residuals, velocities, compressors' memory; feed, hand over and save it."""
