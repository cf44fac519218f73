"""Uncertainty of predictions: scores, calibration errors, abstention, detection, intervals.

All functions take tensors, on any device, and depend on no other part of a prediction. Sums over
examples are exact integers where it matters, so that results do not depend on the order of the
examples, on ties or on the device.
"""

from .abstention import Abstention, risk_threshold
from .calibration_error import (
    ReliabilityBins,
    adaptive_calibration_error,
    classwise_calibration_error,
    reliability,
)
from .intervals import (
    gaussian_mixture_interval,
    gaussian_mixture_noise,
    interval_coverage,
    interval_score,
    interval_width,
)
from .out_of_distribution import detection_metrics
from .regression import crps, gaussian_mixture_nll
from .scores import SCORES, ensemble_energy, variation_ratio
from .selective import RiskCoverage, risk_coverage

__all__ = [
    "SCORES",
    "Abstention",
    "ReliabilityBins",
    "RiskCoverage",
    "adaptive_calibration_error",
    "classwise_calibration_error",
    "crps",
    "detection_metrics",
    "ensemble_energy",
    "gaussian_mixture_interval",
    "gaussian_mixture_nll",
    "gaussian_mixture_noise",
    "interval_coverage",
    "interval_score",
    "interval_width",
    "reliability",
    "risk_coverage",
    "risk_threshold",
    "variation_ratio",
]
