"""Averages of the modes over rounds, for prediction; importing this package registers them."""

from ..core.average import Average, NoAverage, averages
from .ema import EMA
from .snapshots import Snapshots
from .swa import SWA
from .swag import SWAG

__all__ = ["EMA", "SWA", "SWAG", "Average", "NoAverage", "Snapshots", "averages"]
