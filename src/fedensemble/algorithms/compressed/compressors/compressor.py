"""The interface of a compressor.

A compressor maps x to x_hat with E ||x_hat - x||^2 <= omega ||x||^2, and with E x_hat = x if it is
`unbiased`. x_hat can be encoded as a message whose length depends on the length P of x only.
Decoding the message returns x_hat exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

Message = bytes


class Compressor(ABC):
    """Compresses vectors along the last dimension of [..., P], and encodes them as bytes."""

    unbiased: ClassVar[bool] = True

    @abstractmethod
    def compress(self, x: Tensor, uniform: Tensor) -> Tensor:
        """The vector that the receiver gets instead of `x`, [..., P].

        Args:
            x: vectors, [..., P].
            uniform: random numbers in (0, 1), of the shape of `x`.
        """

    @abstractmethod
    def omega(self, size: int) -> float:
        """Bound on E ||x_hat - x||^2 / ||x||^2 for vectors of length P = `size`."""

    @abstractmethod
    def bytes(self, size: int, itemsize: int = 4) -> int:
        """Length in bytes of the message for P = `size` entries of `itemsize` bytes."""

    @abstractmethod
    def encode(self, x: Tensor) -> Message:
        """The message for one compressed vector [P], in the byte order of this machine."""

    @abstractmethod
    def decode(self, message: Message, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The vector [P] that was encoded in `message`."""


def to_bytes(x: Tensor) -> Message:
    """The raw bytes of a tensor, in row-major order."""
    return x.contiguous().numpy().tobytes()


def from_bytes(message: Message, dtype: torch.dtype) -> Tensor:
    """A one-dimensional tensor from its raw bytes."""
    if not message:  # torch.frombuffer rejects empty buffers
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(message), dtype=dtype)
