"""What every quantiser promises.

A quantiser maps x to x_hat with E ||x_hat - x||^2 <= omega ||x||^2, and x_hat = x on average if it
is `unbiased`. What it gives fits into a message whose length depends on P alone, and the message
gives it back bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

Message = bytes


class Quantiser(ABC):
    """A way to say a vector in few bytes; works on the last dimension of [..., P]."""

    unbiased: ClassVar[bool] = True

    @abstractmethod
    def compress(self, x: Tensor, uniform: Tensor) -> Tensor:
        """What the receiver will see of `x`, [..., P]; `uniform` are random numbers in (0, 1) of
        the same shape.
        """

    @abstractmethod
    def omega(self, size: int) -> float:
        """Bound on E ||x_hat - x||^2 / ||x||^2 for vectors of P = `size` numbers."""

    @abstractmethod
    def bytes(self, size: int, itemsize: int = 4) -> int:
        """Length of the message for P = `size` numbers of `itemsize` bytes."""

    @abstractmethod
    def encode(self, x: Tensor) -> Message:
        """The message for one compressed vector, [P]; numbers lie in this machine's byte order."""

    @abstractmethod
    def decode(self, message: Message, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The vector [P] that was encoded."""


def to_bytes(x: Tensor) -> Message:
    """The numbers as they lie in memory."""
    return x.contiguous().numpy().tobytes()


def from_bytes(message: Message, dtype: torch.dtype) -> Tensor:
    """The numbers that were written, in one dimension."""
    return (
        torch.frombuffer(bytearray(message), dtype=dtype)
        if message
        else torch.empty(0, dtype=dtype)
    )
