"""Engines, one file each; importing this package registers them."""

from .local.loop import LoopEngine
from .local.vector import VectorEngine

__all__ = ["LoopEngine", "VectorEngine"]
