"""Built-in schedules; importing this package registers them."""

from .balanced import Balanced
from .best_mode import BestMode
from .by_gradient import ByGradient, ByGradientOncePerAge
from .independent import Independent, IndependentKFold
from .stratified import Stratified
from .worst_mode import WorstMode, WorstModeOncePerAge

__all__ = [
    "Balanced",
    "BestMode",
    "ByGradient",
    "ByGradientOncePerAge",
    "Independent",
    "IndependentKFold",
    "Stratified",
    "WorstMode",
    "WorstModeOncePerAge",
]
