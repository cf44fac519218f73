"""Quantisers: what they make of a vector, and the bytes that carry it."""

from .compressor import Message, Quantiser
from .dither import Dither
from .sparsify import RandK, TopK

__all__ = ["Dither", "Message", "Quantiser", "RandK", "TopK"]
