"""Train a small GPT with DDP and with fxcomp, side by side on shaped links."""
