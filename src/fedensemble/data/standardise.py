"""Stored inputs as numbers a model can work with: the rule, and its constants where they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Standardise:
    """Turns stored inputs into what a model sees: `(x - mean) / std`, per channel, in floating point.

    Images stay in memory as bytes and become numbers batch by batch.

    >>> Standardise(mean=(127.5,), std=(127.5,))(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), torch.float32)
    tensor([[[[-1.,  1.]]]])
    """

    mean: tuple[float, ...]  # one number, or one a channel
    std: tuple[float, ...]

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The standardised inputs, of the shape of `x`."""
        mean, std = (_constant(given, dtype, x.device, x.dim() - 2) for given in (self.mean, self.std))
        return (x.to(dtype) - mean) / std


@cache  # for ever: graphs read them where they lie
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device, sides: int) -> Tensor:
    """Numbers a channel, put on the device once: a CUDA graph cannot fetch them."""
    return torch.tensor(values, dtype=dtype, device=device).reshape(-1, *(1,) * sides)
