"""Built-in schedules; importing this package registers them."""

from .balanced import Balanced
from .independent import Independent, IndependentKFold
from .stratified import Stratified

__all__ = ["Balanced", "Independent", "IndependentKFold", "Stratified"]
