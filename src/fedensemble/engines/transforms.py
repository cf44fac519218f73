"""Convolutions on a CPU by Fourier transforms of small tiles, where filters are large: NNPACK's, which torch has."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..core.cores import inside

_Pair = tuple[int, int]
_BLOCK = 16  # channels that oneDNN computes together, also where there are fewer
_FEWER, _FEWER_WITH_BLOCKS = 5, 8  # times as many products as by transforms; see `pays`
_SEVERAL = 4  # channels
_backward = torch.ops.aten.convolution_backward.default


@cache
def available() -> bool:
    """Whether torch was built with it and it knows this processor, which must be asked before it computes.

    It keeps threads of its own, as many as torch has when it first computes: here one, for several would get in the way
    of shares that train side by side (`threads.py`), which have a core each.
    """
    asked = getattr(torch, "_nnpack_available", None)
    if asked is None or not asked():
        return False
    try:
        with inside(1):
            _convolved(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 5, 5), None, (0, 0))
    except RuntimeError:
        return False
    return True


def pays(x: Tensor, weight: Tensor, padding: _Pair, extent: _Pair) -> bool:
    """Whether transforms are faster on one core for images [J * B, C, H, W] in float32 and filters [J, O, C, h, w].

    By the number of products that oneDNN and transforms need for outputs of this extent; chosen for 144 random layers,
    where it gained a fourth (`benchmarks/cpu_convolutions.py`). 3 × 3 filters are left out: NNPACK takes Winograd's way
    with them, which rounds twenty times as much; the others round less than oneDNN.
    """
    outputs, channels, *size = weight.shape[1:]
    known = channels >= _SEVERAL and size != [3, 3] and max(size) <= 16 and all(map(int.__lt__, padding, size))
    if not (known and torch.get_num_threads() == 1 and available()):
        return False
    direct = 2 * extent[0] * extent[1] * size[0] * size[1]  # forth, and back along the images
    ratio = direct / (_products(extent, size) + _products((x.shape[2], x.shape[3]), size))
    blocks = -(-outputs // _BLOCK) * -(-channels // _BLOCK) * _BLOCK**2 / (outputs * channels)
    return ratio >= _FEWER and ratio * blocks >= _FEWER_WITH_BLOCKS


def _products(extent: _Pair, size: list[int]) -> int:
    """Of numbers in tiles of 8² or 16², whichever NNPACK takes."""

    def tiles(side: int) -> int:
        return prod(-(-length // (side + 1 - reach)) for length, reach in zip(extent, size, strict=True))

    large = tiles(16)
    return 64 * tiles(8) if max(size) <= 8 and tiles(8) <= 4 * large else 256 * large


class Transformed(torch.autograd.Function):
    """Visit j's images [J * B, C, H, W] with visit j's filters [J, O, C, h, w] and bias [J, O] or None; stride 1.

    The slope along the images is such a convolution, too: of the outputs' slope with the filters turned around. Along
    the filters it is oneDNN's, which is faster where channels come last.
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
        wanted, padding = ctx.needs_input_grad, ctx.padding
        images, back = (values.contiguous().chunk(len(weight)) for values in (x, slope))
        along_x = along_weight = along_bias = None
        if wanted[0]:
            turned = weight.flip(3, 4).transpose(1, 2).contiguous()
            around = [size - 1 - beside for size, beside in zip(weight.shape[3:], padding, strict=True)]
            along_x = torch.cat([_convolved(part, w, None, around) for part, w in zip(back, turned, strict=True)])
        if wanted[1] or wanted[2]:
            outputs, like = weight.shape[1], weight[0].contiguous(memory_format=torch.channels_last)
            how = ([outputs], [1, 1], padding, [1, 1], False, [0, 0], 1, [False, wanted[1], wanted[2]])
            pairs = (
                [part.contiguous(memory_format=torch.channels_last) for part in p]
                for p in zip(back, images, strict=True)
            )
            found = [_backward(*pair, like, *how) for pair in pairs]
            along_weight, along_bias = (
                torch.stack([along[n] for along in found]) if wanted[n] else None for n in (1, 2)
            )
        return along_x, along_weight, along_bias, None


def _convolved(images: Tensor, weight: Tensor, bias: Tensor | None, padding: Any) -> Tensor:
    return torch._nnpack_spatial_convolution(images, weight, bias, padding, (1, 1))
