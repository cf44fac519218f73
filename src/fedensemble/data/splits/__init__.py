"""Splits: rows and clients that are held out from training, and for what."""
