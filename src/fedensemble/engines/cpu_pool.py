"""Max-pooling over squares that do not overlap, on a CPU: torch's own took a quarter of a CNN's time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PlanePool(torch.autograd.Function):
    """F.max_pool2d(x, size) with stride = size and no padding, by whole planes of every `size`-th pixel.

    The slope goes to the first of several largest, as in torch. Who that is stands in planes of ones and zeros: torch
    works on numbers several times as fast as on truth values.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        high, wide = (length // size for length in x.shape[-2:])
        squares = x[..., : high * size, : wide * size].reshape(*x.shape[:-2], high, size, wide, size)
        planes = squares.movedim((-3, -1), (0, 1)).clone(memory_format=torch.contiguous_format).flatten(0, 1)
        out = planes[0].clone()
        for plane in planes[1:]:
            torch.maximum(out, plane, out=out)
        left = torch.ones_like(out)  # whose largest pixel is still to come
        for plane in planes[:-1]:
            left.sub_(plane.eq_(out).mul_(left))
        planes[-1] = left
        ctx.save_for_backward(planes)
        ctx.shape, ctx.size = x.shape, size
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        (planes,) = ctx.saved_tensors
        size, (high, wide) = ctx.size, (length // ctx.size * ctx.size for length in ctx.shape[-2:])
        along = slope.new_empty(ctx.shape) if (high, wide) == ctx.shape[-2:] else slope.new_zeros(ctx.shape)
        for place, plane in enumerate(planes):
            torch.mul(plane, slope, out=along[..., place // size : high : size, place % size : wide : size])
        return along, None
