"""Corrupted images: the 15 corruptions of CIFAR10-C at 5 severities, made here instead of loaded.

Constants are those of Hendrycks, Dietterich, "Benchmarking neural network robustness to common
corruptions and perturbations", ICLR 2019, for small images (CIFAR10-C). Lengths in pixels are for
images of about 32x32.
"""

from .corrupt import ABSENT, CORRUPTIONS, SEVERITIES, corrupt

__all__ = ["ABSENT", "CORRUPTIONS", "SEVERITIES", "corrupt"]
