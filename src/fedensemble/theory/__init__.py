"""Numerical checks of the paper's theorems: kernels, Gaussian processes, rates and variances."""

from .bias_variance import correlation, decompose, variance_by_modes
from .gaussian_process import (
    GaussianProcess,
    TrainingMap,
    finite_map,
    limit_map,
    posterior,
    regression,
    visits,
)
from .infinite_width import Kernels, relu_kernels
from .log_posterior import log_posterior
from .rates import (
    drift,
    fit_power_law,
    largest_stable_rate,
    smallest_eigenvalue,
    training_error_bound,
)
from .tangent_kernel import ntk

__all__ = [
    "GaussianProcess",
    "Kernels",
    "TrainingMap",
    "correlation",
    "decompose",
    "drift",
    "finite_map",
    "fit_power_law",
    "largest_stable_rate",
    "limit_map",
    "log_posterior",
    "ntk",
    "posterior",
    "regression",
    "relu_kernels",
    "smallest_eigenvalue",
    "training_error_bound",
    "variance_by_modes",
    "visits",
]
