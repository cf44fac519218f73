"""Quantisers: what they make of a vector, and the bytes that carry it.

A quantiser maps x to x_hat with E ||x_hat - x||^2 <= omega ||x||^2, and x_hat = x on average if it is `unbiased`. What
it gives fits into a message whose length depends on P alone, and the message gives it back bit for bit.

References: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD", NeurIPS 2017 (dithering); Mishchenko, Gorbunov, Takac,
Richtarik, "Distributed learning with compressed gradient differences", 2019 (ternary, p-norms, blocks); Stich,
Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018 (rand-k, top-k).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError

Message = bytes

_SPARE = 2.0**-16  # units of several levels keep 17 bits, so that a level of 7 bits times a unit is exact in float32


class Quantiser(ABC):
    """A way to say a vector in few bytes; works on the last dimension of [..., P]."""

    unbiased: ClassVar[bool] = True

    @abstractmethod
    def compress(self, x: Tensor, uniform: Tensor) -> Tensor:
        """What the receiver will see of `x`, [..., P]; `uniform` are random numbers in (0, 1) of the same shape."""

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


@dataclass(frozen=True)
class Dither(Quantiser):
    """Random dithering in blocks; with one level it is ternary quantisation.

    x_j becomes u sign(x_j) l_j, where u = ||block||_p / levels, and l_j is |x_j| / u rounded up or down at random, so
    that it is right on average.

    A message holds each block's unit u, then levels in base 2 levels + 1, as many to a byte as fit: five trits.

    Args:
        block: entries that share a norm.
        norm: p, "2" or "inf".
        levels: at most 127.

    >>> Dither(block=2).compress(torch.tensor([4.0, -1.0, 0.0]), torch.tensor([0.5, 0.2, 0.5])).tolist()
    [4.0, -4.0, 0.0]
    >>> Dither(block=256).bytes(1000)  # 4 units of 4 bytes, 200 bytes of trits
    216
    """

    block: int = 256
    norm: Literal["2", "inf"] = "inf"
    levels: int = 1

    def __post_init__(self) -> None:
        if self.block < 1 or not 1 <= self.levels <= 127 or self.norm not in ("2", "inf"):
            raise InputError(
                "Dithering needs block >= 1, levels from 1 to 127 and norm '2' or 'inf'; "
                f"got {self.block}, {self.levels} and {self.norm!r}."
            )

    def compress(self, x: Tensor, uniform: Tensor) -> Tensor:
        parts = self._blocks(x)
        size = parts.abs()
        unit = size.amax(-1, keepdim=True)
        if self.norm == "2":  # of what is left without the largest, which could overflow or vanish when squared
            unit = unit * torch.linalg.vector_norm(parts / _one_for_zero(unit), dim=-1, keepdim=True)
        if self.levels > 1:
            mantissa, exponent = torch.frexp(unit / self.levels)
            unit = torch.ldexp(torch.ceil(mantissa / _SPARE) * _SPARE, exponent)  # up: no entry exceeds the levels
        level = (size / _one_for_zero(unit)).clamp(max=self.levels)
        level = level.floor() + (self._blocks(uniform) < level - level.floor())
        return (torch.sign(parts) * level * unit + 0.0).flatten(-2)[..., : x.shape[-1]]  # 0.0 makes -0 a 0

    def omega(self, size: int) -> float:
        width = min(self.block, size)
        # ||x||_1 ||x||_p <= ratio ||x||_2^2, with equality for some x; for one level the variance is their difference.
        ratio = math.sqrt(width) if self.norm == "2" else (1 + math.sqrt(width)) / 2
        spread = ratio - 1 if self.levels == 1 else (1 + 2 * _SPARE) * ratio / self.levels
        return min(spread, (1 + 4 * _SPARE) * width / (4 * self.levels**2))

    def bytes(self, size: int, itemsize: int = 4) -> int:
        return -(-size // self.block) * itemsize + -(-size // self._digits)

    def encode(self, x: Tensor) -> Message:
        parts = self._blocks(x.detach().cpu())
        size = parts.abs()
        least = torch.where(size > 0, size, torch.inf).amin(-1, keepdim=True)
        least = torch.where(least < torch.inf, least, 0)  # the smallest entry is some level times the unit: find which
        unit = least
        for level in range(self.levels, 0, -1):
            candidate = least / level
            levels = torch.round(size / _one_for_zero(candidate))
            fits = ((levels <= self.levels) & (levels * candidate == size)).all(-1, keepdim=True)
            unit = torch.where(fits, candidate, unit)
        levels = torch.round(parts / _one_for_zero(unit)).flatten(-2)[: x.shape[-1]] + self.levels
        digits = pad(levels.to(torch.int64), (0, -x.shape[-1] % self._digits)).reshape(-1, self._digits)
        packed = (digits * self._powers).sum(-1).to(torch.uint8)
        return _to_bytes(unit.flatten()) + _to_bytes(packed)

    def decode(self, message: Message, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        cut = -(-size // self.block) * dtype.itemsize
        unit = _from_bytes(message[:cut], dtype).unsqueeze(-1)
        packed = _from_bytes(message[cut:], torch.uint8).to(torch.int64).unsqueeze(-1)
        levels = (packed // self._powers % (2 * self.levels + 1)).flatten()[:size] - self.levels
        return (self._blocks(levels.to(dtype)) * unit + 0.0).flatten(-2)[:size]

    @property
    def _digits(self) -> int:
        return int(math.log(256 + 0.5) / math.log(2 * self.levels + 1))

    @property
    def _powers(self) -> Tensor:
        return (2 * self.levels + 1) ** torch.arange(self._digits)

    def _blocks(self, x: Tensor) -> Tensor:
        return pad(x, (0, -x.shape[-1] % self.block)).reshape(*x.shape[:-1], -1, self.block)


@dataclass(frozen=True)
class RandK(Quantiser):
    """Keeps k = share P entries chosen at random, times P / k.

    A message holds the k values after their places: a bit for every entry or a number for every value, the shorter.

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
        place = torch.argsort((x == 0).to(torch.int8), stable=True)[:kept].sort().values  # zeros fill up what is free
        if kept * _width(size) < -(-size // 8):
            shifts = 8 * torch.arange(_width(size))
            where = (place.unsqueeze(-1) >> shifts) & 255
        else:
            taken = torch.zeros(-(-size // 8) * 8, dtype=torch.int64).index_fill(0, place, 1)
            where = (taken.reshape(-1, 8) << torch.arange(8)).sum(-1)
        return _to_bytes(where.to(torch.uint8).flatten()) + _to_bytes(x[place])

    def decode(self, message: Message, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        kept = self.kept(size)
        cut = len(message) - kept * dtype.itemsize
        where = _from_bytes(message[:cut], torch.uint8).to(torch.int64)
        if kept * _width(size) < -(-size // 8):
            place = (where.reshape(kept, -1) << 8 * torch.arange(_width(size))).sum(-1)
        else:
            place = torch.nonzero((where.unsqueeze(-1) >> torch.arange(8)) & 1 == 1)
            place = place[:, 0] * 8 + place[:, 1]
        return torch.zeros(size, dtype=dtype).index_copy(0, place, _from_bytes(message[cut:], dtype))


@dataclass(frozen=True)
class TopK(RandK):
    """Keeps the k = share P largest entries as they are: little is lost, but the result is wrong on average.

    >>> TopK(share=0.5).compress(torch.tensor([1.0, -2.0]), torch.tensor([0.1, 0.9])).tolist()
    [0.0, -2.0]
    """

    unbiased = False

    def compress(self, x: Tensor, uniform: Tensor) -> Tensor:
        return _only_first(x, -x.abs(), self.kept(x.shape[-1]))

    def omega(self, size: int) -> float:
        return 1 - self.kept(size) / size


def _only_first(x: Tensor, order: Tensor, count: int) -> Tensor:
    """`x` with zeros in all but the `count` places where `order` is lowest; a stable sort, so that ties are no luck."""
    place = torch.argsort(order, dim=-1, stable=True)[..., :count]
    return torch.zeros_like(x).scatter(-1, place, x.gather(-1, place)) + 0.0


def _one_for_zero(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1)


def _width(size: int) -> int:
    """Bytes of a place among `size`."""
    return max(1, -(-(size - 1).bit_length() // 8))


def _to_bytes(x: Tensor) -> Message:
    return x.contiguous().numpy().tobytes()


def _from_bytes(message: Message, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=dtype) if message else torch.empty(0, dtype=dtype)
