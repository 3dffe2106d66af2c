"""`fxcomp bisect`: find tensors whose compression increases the loss."""
