"""The explanation of a step as data, and one file per format."""
