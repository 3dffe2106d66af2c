"""Random training programs, and what is asked of each: to equal eager PyTorch, or to be refused."""
