"""Random rounding to a few levels, in blocks: ternary quantization and dithering.

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

from ....errors import InputError
from .compressor import Compressor, Message, from_bytes, to_bytes

# With several levels, the unit of a block is rounded to 17 bits. A level (7 bits) times a unit is
# then exact in float32, so that `encode` can recover unit and levels from their products.
_UNIT_PRECISION = 2.0**-16


@dataclass(frozen=True)
class Dither(Compressor):
    """Random dithering in blocks; with one level it is ternary quantization.

    x_j becomes u sign(x_j) l_j, where u = ||block||_p / levels is the unit of the block, and l_j is
    |x_j| / u rounded up or down at random such that it is unbiased.

    A message consists of the unit of each block, followed by the signed levels as digits in base
    2 levels + 1, with as many digits per byte as fit: five trits for ternary quantization.

    Args:
        block: number of entries that share a norm.
        norm: p, "2" or "inf".
        levels: number of steps from zero to the norm, at most 127.

    >>> x, uniform = torch.tensor([4.0, -1.0, 0.0]), torch.tensor([0.5, 0.2, 0.5])
    >>> Dither(block=2).compress(x, uniform).tolist()
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
        blocks = self._split_into_blocks(x)
        magnitude = blocks.abs()
        unit = magnitude.amax(-1, keepdim=True)
        # Divide by the largest entry before computing the 2-norm, because squares of large entries
        # overflow and squares of small ones underflow.
        if self.norm == "2":
            unit = unit * torch.linalg.vector_norm(
                blocks / _replace_zeros_by_one(unit), dim=-1, keepdim=True
            )
        if self.levels > 1:
            # Round the unit up, so that no entry needs more than `levels` levels.
            mantissa, exponent = torch.frexp(unit / self.levels)
            mantissa = torch.ceil(mantissa / _UNIT_PRECISION) * _UNIT_PRECISION
            unit = torch.ldexp(mantissa, exponent)
        level = (magnitude / _replace_zeros_by_one(unit)).clamp(max=self.levels)
        level = level.floor() + (self._split_into_blocks(uniform) < level - level.floor())
        # Adding 0.0 turns -0.0 into 0.0, so that a decoded message has the same bits.
        return (torch.sign(blocks) * level * unit + 0.0).flatten(-2)[..., : x.shape[-1]]

    def omega(self, size: int) -> float:
        width = min(self.block, size)
        # ||x||_1 ||x||_p <= ratio ||x||_2^2, with equality for some x. With one level the variance
        # is ||x||_1 ||x||_p - ||x||_2^2.
        ratio = math.sqrt(width) if self.norm == "2" else (1 + math.sqrt(width)) / 2
        variance = (
            ratio - 1 if self.levels == 1 else (1 + 2 * _UNIT_PRECISION) * ratio / self.levels
        )
        return min(variance, (1 + 4 * _UNIT_PRECISION) * width / (4 * self.levels**2))

    def bytes(self, size: int, itemsize: int = 4) -> int:
        return -(-size // self.block) * itemsize + -(-size // self._digits_per_byte)

    def encode(self, x: Tensor) -> Message:
        blocks = self._split_into_blocks(x.detach().cpu())
        magnitude = blocks.abs()
        smallest = torch.where(magnitude > 0, magnitude, torch.inf).amin(-1, keepdim=True)
        smallest = torch.where(smallest < torch.inf, smallest, 0)  # blocks of zeros
        # The unit is not part of x, so recover it: the smallest entry other than 0 is some level
        # times the unit. Try all levels and take a unit of which all entries are exact multiples.
        unit = smallest
        for level in range(self.levels, 0, -1):
            candidate = smallest / level
            levels = torch.round(magnitude / _replace_zeros_by_one(candidate))
            fits = (levels <= self.levels) & (levels * candidate == magnitude)
            unit = torch.where(fits.all(-1, keepdim=True), candidate, unit)
        signed_levels = torch.round(blocks / _replace_zeros_by_one(unit)).flatten(-2)
        digits = (signed_levels[: x.shape[-1]] + self.levels).to(torch.int64)
        digits = pad(digits, (0, -x.shape[-1] % self._digits_per_byte))
        packed = (digits.reshape(-1, self._digits_per_byte) * self._place_values).sum(-1)
        return to_bytes(unit.flatten()) + to_bytes(packed.to(torch.uint8))

    def decode(self, message: Message, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        unit_bytes = -(-size // self.block) * dtype.itemsize
        unit = from_bytes(message[:unit_bytes], dtype).unsqueeze(-1)
        packed = from_bytes(message[unit_bytes:], torch.uint8).to(torch.int64).unsqueeze(-1)
        digits = (packed // self._place_values % (2 * self.levels + 1)).flatten()[:size]
        signed_levels = (digits - self.levels).to(dtype)
        return (self._split_into_blocks(signed_levels) * unit + 0.0).flatten(-2)[:size]

    @property
    def _digits_per_byte(self) -> int:
        return int(math.log(256 + 0.5) / math.log(2 * self.levels + 1))

    @property
    def _place_values(self) -> Tensor:
        return (2 * self.levels + 1) ** torch.arange(self._digits_per_byte)

    def _split_into_blocks(self, x: Tensor) -> Tensor:
        """The vectors [..., P], padded with zeros, as [..., blocks, block]."""
        # A block larger than the vector is cut to the vector's length (or 65,536), because padding
        # to a huge block would use the memory of a huge vector.
        block = min(self.block, max(x.shape[-1], 1 << 16))
        return pad(x, (0, -x.shape[-1] % block)).reshape(*x.shape[:-1], -1, block)


def _replace_zeros_by_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1)
