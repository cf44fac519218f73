"""Rounding to a few levels at random, in blocks: ternary quantisation and dithering.

References: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD", NeurIPS 2017 (dithering); Mishchenko,
Gorbunov, Takac, Richtarik, "Distributed learning with compressed gradient differences", 2019
(ternary, p-norms, blocks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...errors import InputError
from .compressor import Message, Quantiser, from_bytes, to_bytes

# units of several levels keep 17 bits, so that a level of 7 bits times a unit is exact in float32
_SPARE = 2.0**-16


@dataclass(frozen=True)
class Dither(Quantiser):
    """Random dithering in blocks; with one level it is ternary quantisation.

    x_j becomes u sign(x_j) l_j, where u = ||block||_p / levels, and l_j is |x_j| / u rounded up or
    down at random, so that it is right on average.

    A message holds each block's unit u, then levels in base 2 levels + 1, as many to a byte as fit:
    five trits.

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
        # of what is left without the largest, which could overflow or vanish when squared
        if self.norm == "2":
            unit = unit * torch.linalg.vector_norm(
                parts / _one_for_zero(unit), dim=-1, keepdim=True
            )
        if self.levels > 1:
            mantissa, exponent = torch.frexp(unit / self.levels)
            # up: no entry exceeds the levels
            unit = torch.ldexp(torch.ceil(mantissa / _SPARE) * _SPARE, exponent)
        level = (size / _one_for_zero(unit)).clamp(max=self.levels)
        level = level.floor() + (self._blocks(uniform) < level - level.floor())
        # 0.0 makes -0 a 0
        return (torch.sign(parts) * level * unit + 0.0).flatten(-2)[..., : x.shape[-1]]

    def omega(self, size: int) -> float:
        width = min(self.block, size)
        # ||x||_1 ||x||_p <= ratio ||x||_2^2, with equality for some x; for one level the variance
        # is their difference.
        ratio = math.sqrt(width) if self.norm == "2" else (1 + math.sqrt(width)) / 2
        spread = ratio - 1 if self.levels == 1 else (1 + 2 * _SPARE) * ratio / self.levels
        return min(spread, (1 + 4 * _SPARE) * width / (4 * self.levels**2))

    def bytes(self, size: int, itemsize: int = 4) -> int:
        return -(-size // self.block) * itemsize + -(-size // self._digits)

    def encode(self, x: Tensor) -> Message:
        parts = self._blocks(x.detach().cpu())
        size = parts.abs()
        least = torch.where(size > 0, size, torch.inf).amin(-1, keepdim=True)
        # the smallest entry is some level times the unit: find which
        least = torch.where(least < torch.inf, least, 0)
        unit = least
        for level in range(self.levels, 0, -1):
            candidate = least / level
            levels = torch.round(size / _one_for_zero(candidate))
            fits = ((levels <= self.levels) & (levels * candidate == size)).all(-1, keepdim=True)
            unit = torch.where(fits, candidate, unit)
        levels = torch.round(parts / _one_for_zero(unit)).flatten(-2)[: x.shape[-1]] + self.levels
        digits = pad(levels.to(torch.int64), (0, -x.shape[-1] % self._digits)).reshape(
            -1, self._digits
        )
        packed = (digits * self._powers).sum(-1).to(torch.uint8)
        return to_bytes(unit.flatten()) + to_bytes(packed)

    def decode(self, message: Message, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        cut = -(-size // self.block) * dtype.itemsize
        unit = from_bytes(message[:cut], dtype).unsqueeze(-1)
        packed = from_bytes(message[cut:], torch.uint8).to(torch.int64).unsqueeze(-1)
        levels = (packed // self._powers % (2 * self.levels + 1)).flatten()[:size] - self.levels
        return (self._blocks(levels.to(dtype)) * unit + 0.0).flatten(-2)[:size]

    @property
    def _digits(self) -> int:
        return int(math.log(256 + 0.5) / math.log(2 * self.levels + 1))

    @property
    def _powers(self) -> Tensor:
        return (2 * self.levels + 1) ** torch.arange(self._digits)

    def _blocks(self, x: Tensor) -> Tensor:
        # padding a model to one huge block would take its memory
        block = min(self.block, max(x.shape[-1], 1 << 16))
        return pad(x, (0, -x.shape[-1] % block)).reshape(*x.shape[:-1], -1, block)


def _one_for_zero(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1)
