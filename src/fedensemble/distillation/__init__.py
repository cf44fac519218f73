"""Distils an ensemble into one model, on inputs that need no labels."""
