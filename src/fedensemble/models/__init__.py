"""Models, one file each; importing this package registers them."""

from .cnn import CNN
from .mlp import MLP
from .rbf import RBFLinear
from .registry import models

__all__ = ["CNN", "MLP", "RBFLinear", "models"]
