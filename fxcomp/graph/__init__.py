"""Read, edit, check and print FX graphs of a training step."""
