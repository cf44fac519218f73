"""Trains one run on several processes (ranks), which torchrun starts."""
