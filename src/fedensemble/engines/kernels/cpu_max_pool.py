"""Max-pooling over squares that do not overlap, on a CPU: torch's own took a quarter of a CNN's
time.
"""

from __future__ import annotations

from functools import cache
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu_conv import Pair, choose_algorithm, large, on_cpu


def convolve_and_pool(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    size: int,
) -> Tensor:
    """The largest of each square of what `on_cpu` gives, to the bit.

    Large layers are left in the layout in which oneDNN computes them and pooled there, visit by
    visit: neither are they laid out in torch's way nor have they left the cache.
    """
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    way = choose_algorithm(x, weight, stride, padding, dilation, groups)
    known = (
        x.dtype == torch.float32 and large(x, weight, stride, padding, dilation) and _pools_blocks()
    )
    if way in ("transforms", "product") or not known or not _all_finite(x, weight, bias):
        return MaxPool2d.apply(on_cpu(x, weight, bias, stride, padding, dilation, groups), size)  # type: ignore[no-any-return, no-untyped-call]
    plus = [None] * len(weight) if bias is None else bias
    parts = zip(x.chunk(len(weight)), weight, plus, strict=True)
    images = (
        F.conv2d(part.to_mkldnn(), w, b, stride, padding, dilation, groups) for part, w, b in parts
    )
    return torch.cat([F.max_pool2d(image, size, size).to_dense() for image in images])


def _pools_blocks() -> bool:
    """Whether oneDNN computes in blocks of channels here, and nothing is on that cannot read
    them.
    """
    return _has_blocks() and torch._C._get_mkldnn_enabled() and not torch.is_anomaly_enabled()


@cache
def _has_blocks() -> bool:
    known: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return known and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _all_finite(*values: Tensor | None) -> bool:
    """Whether there is no nan or infinity: oneDNN's pooling passes over nan."""
    return all(isfinite(value.detach().sum()) for value in values if value is not None)


class MaxPool2d(torch.autograd.Function):
    """F.max_pool2d(x, size) with stride = size and no padding, by whole planes of every `size`-th
    pixel.

    The slope goes to the first of several largest, as in torch. Who that is stands in planes of
    ones and zeros: torch works on numbers several times as fast as on truth values.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        high, wide = (length // size for length in x.shape[-2:])
        squares = x[..., : high * size, : wide * size].reshape(
            *x.shape[:-2], high, size, wide, size
        )
        planes = (
            squares.movedim((-3, -1), (0, 1))
            .clone(memory_format=torch.contiguous_format)
            .flatten(0, 1)
        )
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
        along = (
            slope.new_empty(ctx.shape)
            if (high, wide) == ctx.shape[-2:]
            else slope.new_zeros(ctx.shape)
        )
        for place, plane in enumerate(planes):
            torch.mul(
                plane,
                slope,
                out=along[..., place // size : high : size, place % size : wide : size],
            )
        return along, None
