"""Rewrite a graph towards a plan: one pass per file. Passes do not import each other."""
