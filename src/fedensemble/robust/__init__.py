"""Robust aggregators, and the attacks they are tried against; importing this package registers them."""

from ..core.aggregator import Aggregator, Mean, aggregators
from ..core.attack import Attack, attacks
from .clipping import CenteredClipping
from .coordinate import Median, TrimmedMean
from .forgery import ALIE, IPM, Noise, Scaling, SignFlip
from .geometric import GeometricMedian
from .krum import Krum, MultiKrum
from .labels import LabelFlip

__all__ = [
    "ALIE", "IPM", "Aggregator", "Attack", "CenteredClipping", "GeometricMedian", "Krum", "LabelFlip", "Mean", "Median",
    "MultiKrum", "Noise", "Scaling", "SignFlip", "TrimmedMean", "aggregators", "attacks",
]  # fmt: skip
