"""Dropping most entries: rand-k and top-k.

Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import InputError
from .compressor import Message, Quantiser, from_bytes, to_bytes


@dataclass(frozen=True)
class RandK(Quantiser):
    """Keeps k = share P entries chosen at random, times P / k.

    A message holds the k values after their places: a bit for every entry or a number for every
    value, the shorter.

    >>> RandK(share=0.5).compress(torch.tensor([1.0, 2.0]), torch.tensor([0.9, 0.1])).tolist()
    [0.0, 4.0]
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"{type(self).__name__} needs 0 < share <= 1; got {self.share}.")

    def kept(self, size: int) -> int:
        """Entries that are kept of P = `size`."""
        return max(1, math.floor(self.share * size))

    def compress(self, x: Tensor, uniform: Tensor) -> Tensor:
        size = x.shape[-1]
        return _only_first(x * (size / self.kept(size)), uniform, self.kept(size))

    def omega(self, size: int) -> float:
        return size / self.kept(size) - 1

    def bytes(self, size: int, itemsize: int = 4) -> int:
        return self.kept(size) * itemsize + min(self.kept(size) * _width(size), -(-size // 8))

    def encode(self, x: Tensor) -> Message:
        x, size, kept = x.detach().cpu(), len(x), self.kept(len(x))
        # zeros fill up what is free
        place = torch.argsort((x == 0).to(torch.int8), stable=True)[:kept].sort().values
        if kept * _width(size) < -(-size // 8):
            shifts = 8 * torch.arange(_width(size))
            where = (place.unsqueeze(-1) >> shifts) & 255
        else:
            taken = torch.zeros(-(-size // 8) * 8, dtype=torch.int64).index_fill(0, place, 1)
            where = (taken.reshape(-1, 8) << torch.arange(8)).sum(-1)
        return to_bytes(where.to(torch.uint8).flatten()) + to_bytes(x[place])

    def decode(self, message: Message, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        kept = self.kept(size)
        cut = len(message) - kept * dtype.itemsize
        where = from_bytes(message[:cut], torch.uint8).to(torch.int64)
        if kept * _width(size) < -(-size // 8):
            place = (where.reshape(kept, -1) << 8 * torch.arange(_width(size))).sum(-1)
        else:
            place = torch.nonzero((where.unsqueeze(-1) >> torch.arange(8)) & 1 == 1)
            place = place[:, 0] * 8 + place[:, 1]
        return torch.zeros(size, dtype=dtype).index_copy(0, place, from_bytes(message[cut:], dtype))


@dataclass(frozen=True)
class TopK(RandK):
    """Keeps the k = share P largest entries as they are: little is lost, but the result is wrong on
    average.

    >>> TopK(share=0.5).compress(torch.tensor([1.0, -2.0]), torch.tensor([0.1, 0.9])).tolist()
    [0.0, -2.0]
    """

    unbiased = False

    def compress(self, x: Tensor, uniform: Tensor) -> Tensor:
        return _only_first(x, -x.abs(), self.kept(x.shape[-1]))

    def omega(self, size: int) -> float:
        return 1 - self.kept(size) / size


def _only_first(x: Tensor, order: Tensor, count: int) -> Tensor:
    """`x` with zeros in all but the `count` places where `order` is lowest; a stable sort, so that
    ties are no luck.
    """
    place = torch.argsort(order, dim=-1, stable=True)[..., :count]
    return torch.zeros_like(x).scatter(-1, place, x.gather(-1, place)) + 0.0


def _width(size: int) -> int:
    """Bytes of a place among `size`."""
    return max(1, -(-(size - 1).bit_length() // 8))
