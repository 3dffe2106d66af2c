"""`fxcomp demo`: compare DDP and fxcomp on shaped links."""
