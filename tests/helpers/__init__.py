"""Shared by tests: jobs, ranks, graphs and plans by hand, and comparisons with eager. Tests import it as `helpers`."""
