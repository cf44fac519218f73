"""Triton kernels; import them inside functions, after checking for a GPU."""
