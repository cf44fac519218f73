"""Lossy compressors of vectors, and the byte encoding of their results."""

from .compressor import Compressor, Message
from .dither import Dither
from .sparsify import RandK, TopK

__all__ = ["Compressor", "Dither", "Message", "RandK", "TopK"]
