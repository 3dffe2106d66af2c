"""Emit a final graph as Python source, and load it as a program."""
