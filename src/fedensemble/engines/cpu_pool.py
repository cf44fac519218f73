"""Max-pooling over squares that do not overlap, on a CPU: torch's own took a quarter of a CNN's time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PlanePool(torch.autograd.Function):
    """F.max_pool2d(x, size) with stride = size and no padding, by whole planes of every `size`-th pixel.

    The slope goes to the first of several largest, as in torch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        high = _largest([x[..., row : x.shape[-2] // size * size : size, :] for row in range(size)])
        out = _largest([high[..., column : x.shape[-1] // size * size : size] for column in range(size)])
        ctx.save_for_backward(x, out.clone())  # for a module may write into what it gets
        ctx.size = size
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, out = ctx.saved_tensors
        size, (height, width) = ctx.size, x.shape[-2:]
        whole = height % size == width % size == 0
        along = torch.empty_like(x) if whole else torch.zeros_like(x)
        height, width = height // size * size, width // size * size
        left = torch.ones_like(out, dtype=torch.bool)  # whose largest pixel is still to come
        for place in range(size * size):
            plane = (..., slice(place // size, height, size), slice(place % size, width, size))
            here = left if place == size * size - 1 else (x[plane] == out).logical_and_(left)
            torch.mul(slope, here, out=along[plane])
            left = left ^ here
        return along, None


def _largest(planes: list[Tensor]) -> Tensor:
    best = planes[0]
    for plane in planes[1:]:
        best = torch.maximum(best, plane)
    return best
