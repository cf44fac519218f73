"""Checks of labels, and labels that are names."""
