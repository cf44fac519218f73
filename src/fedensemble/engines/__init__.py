"""Engines, one file each. Importing this package registers `loop` and `vector`."""

from .local.loop import LoopEngine
from .local.vector import VectorEngine

__all__ = ["LoopEngine", "VectorEngine"]
