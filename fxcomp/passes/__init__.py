"""Rewrite a graph towards a plan: one pass a file, and no pass knows another."""
