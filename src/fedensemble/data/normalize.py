"""Normalization of stored inputs: `Standardise`, the rule of `FederatedData.standardise`.

Any mean and std are possible: mean 0 and std 255 scale images to 0..1.
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
    """Normalizes stored inputs for the model: `(x - mean) / std`, per channel, in floating point.

    Images stay in memory as bytes. They are converted to floating point batch by batch.

    Args:
        mean, std: one value, or one value per channel.

    >>> image = torch.tensor([[[[0, 255]]]], dtype=torch.uint8)
    >>> Standardise(mean=(127.5,), std=(127.5,))(image, torch.float32)
    tensor([[[[-1.,  1.]]]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            argument = getattr(self, name)
            values = tuple(argument) if isinstance(argument, (tuple, list)) else (argument,)
            real = all(isinstance(value, Real) and not isinstance(value, bool) for value in values)
            if not values or not real or not all(math.isfinite(value) for value in values):
                raise InputError(
                    f"Standardise needs finite numbers, one or one per channel, as {name}; "
                    f"got {argument!r}."
                )
            if name == "std" and min(values) <= 0:
                raise InputError(f"Standardise needs std > 0; got {argument!r}.")
            object.__setattr__(self, name, tuple(float(value) for value in values))

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the normalized inputs, with the shape of `x`."""
        mean, std = (
            _cached_constant(values, dtype, x.device, x.dim() - 2)
            for values in (self.mean, self.std)
        )
        return (x.to(dtype) - mean) / std


# The cache has two purposes. It avoids a copy from the host per batch, which is not allowed while
# a CUDA graph is captured. And it must never evict an entry, because captured CUDA graphs hold the
# addresses of these tensors: a graph would read freed memory.
@cache
def _cached_constant(
    values: tuple[float, ...], dtype: torch.dtype, device: torch.device, spatial_dims: int
) -> Tensor:
    """Returns one value per channel on the device, shaped to broadcast over the spatial dims."""
    return torch.tensor(values, dtype=dtype, device=device).reshape(-1, *(1,) * spatial_dims)
