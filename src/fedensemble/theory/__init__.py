"""Closed forms of the paper's theory."""
