"""Convolutions on a CPU by Fourier transforms of small tiles, where filters are large: NNPACK's,
which torch has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...runtime.num_threads import num_threads

_Pair = tuple[int, int]
_BLOCK = 16  # channels that oneDNN computes together, also where there are fewer
_SEVERAL = 4  # channels
# Times as many products as by transforms from which these are faster, also counting those that
# blocks waste; and for
# the slope along filters. See `pays`.
_FEWER, _FEWER_WITH_BLOCKS, _FEWER_FOR_FILTERS = 5, 12, 4.5
_backward = torch.ops.aten.convolution_backward.default


@cache
def available() -> bool:
    """Whether torch was built with it and it knows this processor, which must be asked before it
    computes.

    It keeps threads of its own, as many as torch has when it first computes: here one, for several
    would get in the way of shares that train side by side (`threads.py`), which have a core each.
    """
    asked = getattr(torch, "_nnpack_available", None)
    if asked is None or not asked():
        return False
    try:
        with num_threads(1):
            image = torch.zeros(1, 1, 5, 5, dtype=torch.float32, device="cpu")
            _convolved(image, image, None, (0, 0))
    except RuntimeError:
        return False
    return True


def pays(x: Tensor, weight: Tensor, padding: _Pair, extent: _Pair) -> bool:
    """Whether transforms are faster on one core for images [J * B, C, H, W] in float32 and filters
    [J, O, C, h, w].

    By the number of products that oneDNN and transforms need for outputs of this extent. Random
    layers that this chooses were 1.5 times as fast on an AMD EPYC (4 of 150 over 5 % slower) and
    1.3 times on an Intel Xeon (17 of 204).
    """
    outputs, channels, *size = weight.shape[1:]
    if (
        channels < _SEVERAL
        or not _known(size, padding)
        or torch.get_num_threads() > 1
        or not available()
    ):
        return False
    direct = 2 * prod(extent) * prod(size)  # forth, and back along the images
    ratio = direct / (_products(extent, size) + _products(x.shape[2:], size))
    blocks = -(-outputs // _BLOCK) * -(-channels // _BLOCK) * _BLOCK**2 / (outputs * channels)
    return ratio >= _FEWER and ratio * blocks >= _FEWER_WITH_BLOCKS


def _pays_for_filters(extent: Sequence[int], size: Sequence[int], padding: _Pair) -> bool:
    """The same for the slope along filters of this extent, computed with outputs of this size as
    filters.
    """
    return _known(size, padding) and prod(extent) * prod(size) >= _FEWER_FOR_FILTERS * _products(
        extent, size
    )


def _known(size: Sequence[int], padding: _Pair) -> bool:
    """Whether NNPACK transforms filters of this size by Fourier, which rounds less than oneDNN.

    With 3 × 3 it takes Winograd's way, which rounds twenty times as much.
    """
    return tuple(size) != (3, 3) and max(size) <= 16 and all(map(int.__lt__, padding, size))


def _products(extent: Sequence[int], size: Sequence[int]) -> int:
    """Of numbers in tiles of 8² or 16², whichever NNPACK takes."""

    def tiles(side: int) -> int:
        return prod(
            -(-length // (side + 1 - reach)) for length, reach in zip(extent, size, strict=True)
        )

    large = tiles(16)
    return 64 * tiles(8) if max(size) <= 8 and tiles(8) <= 4 * large else 256 * large


class FFTConv(torch.autograd.Function):
    """Visit j's images [J * B, C, H, W] with visit j's filters [J, O, C, h, w] and bias [J, O] or
    None; stride 1.

    Slopes are such convolutions, too. Along the images: of the outputs' slope with the filters
    turned around. Along the
    filters: of the images with the outputs' slope, where examples are channels and channels
    examples; if the outputs are too large for that, oneDNN's, which is faster where channels come
    last.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: _Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        plus = [None] * len(weight) if bias is None else bias
        parts = zip(x.contiguous().chunk(len(weight)), weight.contiguous(), plus, strict=True)
        return torch.cat([_convolved(images, w, b, padding) for images, w, b in parts])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        along_x = along_weight = along_bias = None
        if ctx.needs_input_grad[0]:
            turned = weight.flip(3, 4).transpose(1, 2).contiguous()
            around = [
                size - 1 - beside
                for size, beside in zip(weight.shape[3:], ctx.padding, strict=True)
            ]
            parts = zip(slope.contiguous().chunk(len(weight)), turned, strict=True)
            along_x = torch.cat([_convolved(back, w, None, around) for back, w in parts])
        if ctx.needs_input_grad[1]:
            along_weight = _along_filters(x, weight, slope, ctx.padding)
        if ctx.needs_input_grad[2]:
            along_bias = slope.reshape(len(weight), -1, *slope.shape[1:]).sum((1, 3, 4))
        return along_x, along_weight, along_bias, None


def _along_filters(x: Tensor, weight: Tensor, slope: Tensor, padding: _Pair) -> Tensor:
    visits = len(weight)
    if _pays_for_filters(weight.shape[3:], slope.shape[2:], padding):
        images, back = (
            t.reshape(visits, -1, *t.shape[1:]).transpose(1, 2).contiguous() for t in (x, slope)
        )
        parts = [_convolved(*pair, None, padding) for pair in zip(images, back, strict=True)]
        return torch.stack(parts).transpose(1, 2)
    # of which only the shape matters
    like = weight[0].contiguous(memory_format=torch.channels_last)
    how = (like, None, [1, 1], padding, [1, 1], False, [0, 0], 1, [False, True, False])
    pairs = zip(slope.chunk(visits), x.chunk(visits), strict=True)
    last = ([part.contiguous(memory_format=torch.channels_last) for part in pair] for pair in pairs)
    return torch.stack([_backward(*pair, *how)[1] for pair in last])


def _convolved(
    images: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]
) -> Tensor:
    return torch._nnpack_spatial_convolution(images, weight, bias, padding, (1, 1))
