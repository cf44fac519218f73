"""Uncertainty of predictions: scores, calibration errors, abstention, detection, intervals.

All functions take tensors, on any device, and depend on no other part of a prediction. Sums over
examples are exact integers where it matters, so that results do not depend on the order of the
examples, on ties or on the device.
"""

from .abstention import Abstention, risk_threshold
from .calibration import Calibration
from .calibration_error import (
    ReliabilityBins,
    adaptive_calibration_error,
    classwise_calibration_error,
    reliability,
)
from .calibration_settings import CalibrationSettings
from .conformal_scores import class_scores, interval_scores, interval_within
from .conformal_threshold import conformal_threshold
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
from .temperature import fit_temperature, temperature_sums

__all__ = [
    "SCORES",
    "Abstention",
    "Calibration",
    "CalibrationSettings",
    "ReliabilityBins",
    "RiskCoverage",
    "adaptive_calibration_error",
    "class_scores",
    "classwise_calibration_error",
    "conformal_threshold",
    "crps",
    "detection_metrics",
    "ensemble_energy",
    "fit_temperature",
    "gaussian_mixture_interval",
    "gaussian_mixture_nll",
    "gaussian_mixture_noise",
    "interval_coverage",
    "interval_score",
    "interval_scores",
    "interval_width",
    "interval_within",
    "reliability",
    "risk_coverage",
    "risk_threshold",
    "temperature_sums",
    "variation_ratio",
]
