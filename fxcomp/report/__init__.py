"""Explain a step: the explanation as data, and one file per format."""
