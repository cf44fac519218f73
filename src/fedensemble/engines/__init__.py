"""Engines, one file each; importing this package registers them."""

from .loop import LoopEngine
from .vector import VectorEngine

__all__ = ["LoopEngine", "VectorEngine"]
