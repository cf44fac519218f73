"""Who is asked and whose answer counts: device speeds, over-selection, drop-outs, hours of the
day.
"""

from ..core.participation import Everybody
from .devices import Devices

__all__ = ["Devices", "Everybody"]
