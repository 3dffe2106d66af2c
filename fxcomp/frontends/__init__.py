"""Entry points: `compile_step`, the `torch.compile` backend, and others."""
