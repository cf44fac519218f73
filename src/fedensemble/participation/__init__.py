"""Simulated participation: device speeds, over-selection, drop-outs and hours of the day."""

from ..core.participation import Everybody
from .devices import Devices

__all__ = ["Devices", "Everybody"]
