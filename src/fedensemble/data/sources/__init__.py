"""Datasets by name, and the files that they are read from."""
