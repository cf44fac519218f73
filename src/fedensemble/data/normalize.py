"""Stored inputs as numbers a model can work with: the rule, and its constants where they are
needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from numbers import Real

import torch
from torch import Tensor

from ..errors import InputError


@dataclass(frozen=True)
class Standardise:
    """Turns stored inputs into what a model sees: `(x - mean) / std`, per channel, in floating
    point.

    Images stay in memory as bytes and become numbers batch by batch.

    >>> Standardise(mean=(127.5,), std=(127.5,))(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), torch.float32)
    tensor([[[[-1.,  1.]]]])
    """

    mean: tuple[float, ...]  # one number, or one a channel
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            given = getattr(self, name)
            numbers = tuple(given) if isinstance(given, (tuple, list)) else (given,)
            real = all(
                isinstance(number, Real) and not isinstance(number, bool) for number in numbers
            )
            if not numbers or not real or not all(math.isfinite(number) for number in numbers):
                raise InputError(
                    f"Standardise needs finite numbers, one or one per channel, as {name}; got {given!r}."
                )
            if name == "std" and min(numbers) <= 0:
                raise InputError(f"Standardise needs std > 0; got {given!r}.")
            object.__setattr__(self, name, tuple(float(number) for number in numbers))

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The standardised inputs, of the shape of `x`."""
        mean, std = (
            _constant(given, dtype, x.device, x.dim() - 2) for given in (self.mean, self.std)
        )
        return (x.to(dtype) - mean) / std


@cache  # for ever: graphs read them where they lie
def _constant(
    values: tuple[float, ...], dtype: torch.dtype, device: torch.device, sides: int
) -> Tensor:
    """Numbers a channel, put on the device once: a CUDA graph cannot fetch them."""
    return torch.tensor(values, dtype=dtype, device=device).reshape(-1, *(1,) * sides)
