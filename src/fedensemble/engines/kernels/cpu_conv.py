"""Convolutions with the filters of J visits on a CPU, and the rule that picks an algorithm."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]
Algorithm = Literal["pointwise", "per client", "grouped", "grouped, channels last"]
_SMALL_LAYER = 1 << 16  # input and output elements of one visit
_ONEDNN_BLOCK = 8  # channels that oneDNN computes together
_SMALL_FILTERS = 8  # times fewer elements than an image and its output


def conv2d_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    """Convolves the examples of visit j with the filters of visit j, see `choose_algorithm`."""
    algorithm = choose_algorithm(x, weight, stride, padding, dilation, groups)
    if algorithm == "pointwise":
        return pointwise_conv(x, weight, bias, stride)
    if algorithm == "per client":
        return per_client_conv(x, weight, bias, stride, padding, dilation, groups)
    last = algorithm == "grouped, channels last"
    return grouped_conv(x, weight, stride, padding, dilation, groups, bias, channels_last=last)


def choose_algorithm(
    x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Algorithm:
    """The algorithm for images [J * B, C, H, W] and filters [J, O, C / groups, h, w] on a CPU.

    The choice depends on shapes only and never on timings, so that a run always gives the same
    bits. `benchmarks/cpu_convolutions.py` measures it against the alternatives:

    1. 1x1 convolutions are matmuls, for which oneDNN took up to one and a half times as long.
    2. A small layer runs as one grouped convolution for all visits, because one call per visit
       costs over a tenth of a millisecond for forward and backward. Channels that do not fill
       oneDNN's blocks come last in memory, where it needs no blocks. oneDNN has no float64.
    3. A large layer runs visit by visit: its data stay in the cache, and nothing is copied.
    """
    if weight.shape[3:] == (1, 1) and groups == 1 and padding == (0, 0):
        return "pointwise"
    visits, outputs, channels = weight.shape[:3]
    if visits > 1 and is_large(x, weight, stride, padding, dilation):
        return "per client"
    uneven = channels > 1 and (channels % _ONEDNN_BLOCK or outputs // groups % _ONEDNN_BLOCK)
    return "grouped, channels last" if uneven and x.dtype == torch.float32 else "grouped"


def is_large(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> bool:
    """True if the input and output of one visit's layer have many elements."""
    output = weight.shape[1] * output_pixels(x, weight, stride, padding, dilation)
    return len(x) // len(weight) * (x[0].numel() + output) > _SMALL_LAYER


def output_pixels(
    x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair = (1, 1)
) -> int:
    """Height times width of a convolution's output."""
    pixels = 1
    for n in (0, 1):
        extent = dilation[n] * (weight.shape[3 + n] - 1) + 1
        pixels *= (x.shape[2 + n] + 2 * padding[n] - extent) // stride[n] + 1
    return pixels


def per_client_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    """One convolution per visit."""
    biases = [None] * len(weight) if bias is None else bias
    visits = zip(x.chunk(len(weight)), weight, biases, strict=True)
    return torch.cat(
        [F.conv2d(images, w, b, stride, padding, dilation, groups) for images, w, b in visits]
    )


def grouped_conv(
    x: Tensor,
    weight: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair = (1, 1),
    groups: int = 1,
    bias: Tensor | None = None,
    channels_last: bool = False,
) -> Tensor:
    """One convolution with J times the groups: images [B, J * C, H, W]."""
    visits, outputs = weight.shape[:2]
    images = x.reshape(visits, -1, *x.shape[1:])
    if channels_last:
        wide = images.permute(1, 3, 4, 0, 2).flatten(3).permute(0, 3, 1, 2)
    else:
        wide = images.transpose(0, 1).flatten(1, 2)
    biases = None if bias is None else bias.flatten()
    out = F.conv2d(wide, weight.flatten(0, 1), biases, stride, padding, dilation, visits * groups)
    return out.reshape(len(wide), visits, outputs, *out.shape[2:]).transpose(0, 1).flatten(0, 1)


def pointwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair) -> Tensor:
    """Filters [J, O, C, 1, 1] without padding as one batched matmul.

    Small filters are repeated for each image; otherwise the images of a visit are put side by side,
    which needs less memory.
    """
    visits, outputs, channels = weight.shape[:3]
    x = x[:, :, :: stride[0], :: stride[1]]
    tall, wide = x.shape[2:]
    filters, images = weight.flatten(2), x.reshape(visits, -1, channels, tall * wide)
    if _SMALL_FILTERS * outputs * channels <= (channels + outputs) * tall * wide:
        out = filters[:, None] @ images  # [J, B, O, H' * W']
    else:
        joined = filters @ images.transpose(1, 2).flatten(2)
        out = joined.reshape(visits, outputs, -1, tall * wide).transpose(1, 2)
    out = out if bias is None else out + bias[:, None, :, None]
    return out.reshape(len(x), outputs, tall, wide)
