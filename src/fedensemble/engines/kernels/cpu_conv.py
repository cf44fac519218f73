"""Convolutions with J sets of filters by torch's own operations: several ways, and which of them on
a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu_fft_conv

Pair = tuple[int, int]
_SMALL = 1 << 16  # numbers that go into and come out of a visit's layer
_BLOCK = 8  # channels that oneDNN computes together
_FEW_FILTERS = 8  # times fewer numbers than an image and its outputs have


def on_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    """Visit j's images with visit j's filters, in the way that `choose_algorithm` names."""
    way = choose_algorithm(x, weight, stride, padding, dilation, groups)
    if way == "product":
        return product(x, weight, bias, stride)
    if way == "transforms":
        return cpu_fft_conv.FFTConv.apply(x, weight, bias, padding)  # type: ignore[no-any-return, no-untyped-call]
    if way == "one by one":
        return per_client_conv(x, weight, bias, stride, padding, dilation, groups)
    return grouped(
        x,
        weight,
        stride,
        padding,
        dilation,
        groups,
        bias,
        channels_last=way == "grouped, channels last",
    )


def choose_algorithm(
    x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> str:
    """The way for images [J * B, C, H, W] and filters [J, O, C / groups, h, w] on a CPU.

    From shapes and never from timings, so that a run always gives the same bits; measured, also
    against the other ways, by `benchmarks/cpu_convolutions.py`:

    1. Filters of one pixel are a matrix product, for which oneDNN took up to one and a half times
    as long. 2. A layer whose inputs and outputs are few is computed in one call for all visits,
       since a call for each costs over a tenth of a millisecond forth and back. Channels that do
       not fill oneDNN's blocks come last in memory, where it needs no blocks; float64 it does not
       compute at all.
    3. A larger one is computed visit by visit: that stays in the cache and copies nothing side by
       side. If its filters are large and its channels do not fill blocks, by transforms; see
       `transforms.pays`.
    """
    if weight.shape[3:] == (1, 1) and groups == 1 and padding == (0, 0):
        return "product"
    visits, outputs, channels = weight.shape[:3]
    if large(x, weight, stride, padding, dilation):
        plain = x.dtype == torch.float32 and groups == 1 and stride == dilation == (1, 1)
        if plain and cpu_fft_conv.pays(
            x, weight, padding, extent(x, weight, stride, padding, dilation)
        ):
            return "transforms"
        if visits > 1:
            return "one by one"
    uneven = channels > 1 and (channels % _BLOCK or outputs // groups % _BLOCK)
    return "grouped, channels last" if uneven and x.dtype == torch.float32 else "grouped"


def large(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> bool:
    """Whether many numbers go into and come out of a visit's layer."""
    numbers = x[0].numel() + weight.shape[1] * pixels(x, weight, stride, padding, dilation)
    return len(x) // len(weight) * numbers > _SMALL


def pixels(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair = (1, 1)) -> int:
    """Of what a convolution gives for one image."""
    tall, wide = extent(x, weight, stride, padding, dilation)
    return tall * wide


def extent(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Pair:
    """Height and width of what a convolution gives."""
    reach = [dilation[n] * (weight.shape[3 + n] - 1) + 1 for n in (0, 1)]
    tall, wide = ((x.shape[2 + n] + 2 * padding[n] - reach[n]) // stride[n] + 1 for n in (0, 1))
    return tall, wide


def per_client_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    """A convolution a visit."""
    plus = [None] * len(weight) if bias is None else bias
    parts = zip(x.chunk(len(weight)), weight, plus, strict=True)
    return torch.cat(
        [F.conv2d(images, w, b, stride, padding, dilation, groups) for images, w, b in parts]
    )


def grouped(
    x: Tensor,
    weight: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair = (1, 1),
    groups: int = 1,
    bias: Tensor | None = None,
    channels_last: bool = False,
) -> Tensor:
    """One convolution with J times the groups: [B, J * C, H, W]."""
    visits, outputs = weight.shape[:2]
    images = x.reshape(visits, -1, *x.shape[1:])
    if channels_last:
        side = images.permute(1, 3, 4, 0, 2).flatten(3).permute(0, 3, 1, 2)
    else:
        side = images.transpose(0, 1).flatten(1, 2)
    plus = None if bias is None else bias.flatten()
    out = F.conv2d(side, weight.flatten(0, 1), plus, stride, padding, dilation, visits * groups)
    return out.reshape(len(side), visits, outputs, *out.shape[2:]).transpose(0, 1).flatten(0, 1)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair) -> Tensor:
    """Filters [J, O, C, 1, 1] without padding as one batched matrix product.

    Few filters are repeated for each image; otherwise a visit's images are laid side by side, which
    needs less memory.
    """
    visits, outputs, channels = weight.shape[:3]
    x = x[:, :, :: stride[0], :: stride[1]]
    tall, wide = x.shape[2:]
    filters, images = weight.flatten(2), x.reshape(visits, -1, channels, tall * wide)
    if _FEW_FILTERS * outputs * channels <= (channels + outputs) * tall * wide:
        out = filters[:, None] @ images  # [J, B, O, H' * W']
    else:
        aside = filters @ images.transpose(1, 2).flatten(2)
        out = aside.reshape(visits, outputs, -1, tall * wide).transpose(1, 2)
    out = out if bias is None else out + bias[:, None, :, None]
    return out.reshape(len(x), outputs, tall, wide)
