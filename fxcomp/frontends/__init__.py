"""Enter here: `compile_step`, the `torch.compile` backend, predictions without a cluster."""
