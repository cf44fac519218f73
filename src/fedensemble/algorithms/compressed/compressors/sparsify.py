"""Sparsification: rand-k and top-k, which set most entries to zero.

Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ....errors import InputError
from .compressor import Compressor, Message, from_bytes, to_bytes


@dataclass(frozen=True)
class RandK(Compressor):
    """Keeps k = share P entries, chosen at random, and multiplies them by P / k.

    A message consists of the positions of the k entries and their values. Positions are either one
    bit per entry of the vector or one index per value, whichever is shorter.

    >>> RandK(share=0.5).compress(torch.tensor([1.0, 2.0]), torch.tensor([0.9, 0.1])).tolist()
    [0.0, 4.0]
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"{type(self).__name__} needs 0 < share <= 1; got {self.share}.")

    def num_kept(self, size: int) -> int:
        """The number of entries that are kept of P = `size`."""
        return max(1, math.floor(self.share * size))

    def compress(self, x: Tensor, uniform: Tensor) -> Tensor:
        size = x.shape[-1]
        return _keep_lowest(x * (size / self.num_kept(size)), uniform, self.num_kept(size))

    def omega(self, size: int) -> float:
        return size / self.num_kept(size) - 1

    def bytes(self, size: int, itemsize: int = 4) -> int:
        return self.num_kept(size) * itemsize + min(
            self.num_kept(size) * _index_bytes(size), -(-size // 8)
        )

    def encode(self, x: Tensor) -> Message:
        x, size, count = x.detach().cpu(), len(x), self.num_kept(len(x))
        # Nonzero entries come first in this order. If there are fewer than `count`, some zeros are
        # encoded too, because the length of a message depends on P only.
        index = torch.argsort((x == 0).to(torch.int8), stable=True)[:count].sort().values
        if count * _index_bytes(size) < -(-size // 8):
            shifts = 8 * torch.arange(_index_bytes(size))
            positions = (index.unsqueeze(-1) >> shifts) & 255
        else:
            mask = torch.zeros(-(-size // 8) * 8, dtype=torch.int64).index_fill(0, index, 1)
            positions = (mask.reshape(-1, 8) << torch.arange(8)).sum(-1)
        return to_bytes(positions.to(torch.uint8).flatten()) + to_bytes(x[index])

    def decode(self, message: Message, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        count = self.num_kept(size)
        position_bytes = len(message) - count * dtype.itemsize
        positions = from_bytes(message[:position_bytes], torch.uint8).to(torch.int64)
        if count * _index_bytes(size) < -(-size // 8):
            shifts = 8 * torch.arange(_index_bytes(size))
            index = (positions.reshape(count, -1) << shifts).sum(-1)
        else:
            bits = torch.nonzero((positions.unsqueeze(-1) >> torch.arange(8)) & 1 == 1)
            index = bits[:, 0] * 8 + bits[:, 1]
        values = from_bytes(message[position_bytes:], dtype)
        return torch.zeros(size, dtype=dtype).index_copy(0, index, values)


@dataclass(frozen=True)
class TopK(RandK):
    """Keeps the k = share P largest entries unchanged: a small error, but a biased result.

    >>> TopK(share=0.5).compress(torch.tensor([1.0, -2.0]), torch.tensor([0.1, 0.9])).tolist()
    [0.0, -2.0]
    """

    unbiased = False

    def compress(self, x: Tensor, uniform: Tensor) -> Tensor:
        return _keep_lowest(x, -x.abs(), self.num_kept(x.shape[-1]))

    def omega(self, size: int) -> float:
        return 1 - self.num_kept(size) / size


def _keep_lowest(x: Tensor, order: Tensor, count: int) -> Tensor:
    """`x` with zeros everywhere except at the `count` positions with the lowest `order`."""
    # The sort is stable so that ties are resolved in the same way on every device.
    index = torch.argsort(order, dim=-1, stable=True)[..., :count]
    return torch.zeros_like(x).scatter(-1, index, x.gather(-1, index)) + 0.0


def _index_bytes(size: int) -> int:
    """The number of bytes of an index below `size`."""
    return max(1, -(-(size - 1).bit_length() // 8))
