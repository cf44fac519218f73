"""Built-in schedules; importing this package registers them."""

from .balanced import Balanced
from .by_gradient import ByGradient, ByGradientOncePerAge
from .independent import Independent, IndependentKFold
from .stratified import Stratified
from .worst_mode import WorstMode, WorstModeOncePerAge

__all__ = [
    "Balanced",
    "ByGradient",
    "ByGradientOncePerAge",
    "Independent",
    "IndependentKFold",
    "Stratified",
    "WorstMode",
    "WorstModeOncePerAge",
]
