"""Quantisers: what they make of a vector, and the bytes that carry it."""

from .dither import Dither
from .quantiser import Message, Quantiser
from .sparse import RandK, TopK

__all__ = ["Dither", "Message", "Quantiser", "RandK", "TopK"]
