"""Parts of the kill sweep: draws, jobs, faults, starts and verdicts."""
