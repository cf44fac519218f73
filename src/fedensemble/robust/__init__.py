"""Robust aggregators and simulated attacks; importing this package registers them."""

from ..core.aggregator import Aggregator, Mean, aggregators
from ..core.attack import Attack, attacks
from .centered_clipping import CenteredClipping
from .coordinate_wise import Median, TrimmedMean
from .geometric_median import GeometricMedian
from .krum import Krum, MultiKrum
from .label_attack import LabelFlip
from .upload_attacks import ALIE, IPM, Noise, Scaling, SignFlip

__all__ = [
    "ALIE",
    "IPM",
    "Aggregator",
    "Attack",
    "CenteredClipping",
    "GeometricMedian",
    "Krum",
    "LabelFlip",
    "Mean",
    "Median",
    "MultiKrum",
    "Noise",
    "Scaling",
    "SignFlip",
    "TrimmedMean",
    "aggregators",
    "attacks",
]
