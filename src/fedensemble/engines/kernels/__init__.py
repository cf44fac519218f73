"""Kernels of the stacked engine for CPUs; the package `triton` has those for GPUs."""
