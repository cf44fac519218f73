"""Max-pooling with square windows that do not overlap, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class MaxPool2d(torch.autograd.Function):
    """F.max_pool2d(x, size) with stride = size and no padding.

    torch's own kernel goes through the windows one by one and took a quarter of a small CNN's time.
    Here the pixels at the same position of all windows form one plane, and `size ** 2` planes are
    combined by vectorized operations.

    The gradient goes to the first of several equal maxima, as in torch. Which pixel that is is kept
    as planes of ones and zeros in the dtype of the images: torch computes with them several times
    as fast as with booleans.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        tall, wide = (length // size for length in x.shape[-2:])
        cropped = x[..., : tall * size, : wide * size]
        windows = cropped.reshape(*x.shape[:-2], tall, size, wide, size)
        planes = windows.movedim((-3, -1), (0, 1))
        planes = planes.clone(memory_format=torch.contiguous_format).flatten(0, 1)
        out = planes[0].clone()
        for plane in planes[1:]:
            torch.maximum(out, plane, out=out)
        remaining = torch.ones_like(out)  # 1 for windows whose maximum has not been found yet
        for plane in planes[:-1]:
            remaining.sub_(plane.eq_(out).mul_(remaining))
        planes[-1] = remaining
        ctx.save_for_backward(planes)
        ctx.shape, ctx.size = x.shape, size
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (planes,) = ctx.saved_tensors
        size, (tall, wide) = ctx.size, (length // ctx.size * ctx.size for length in ctx.shape[-2:])
        covered = (tall, wide) == ctx.shape[-2:]
        new = grad_output.new_empty if covered else grad_output.new_zeros
        grad_input = new(ctx.shape)
        for place, plane in enumerate(planes):
            window = grad_input[..., place // size : tall : size, place % size : wide : size]
            torch.mul(plane, grad_output, out=window)
        return grad_input, None
