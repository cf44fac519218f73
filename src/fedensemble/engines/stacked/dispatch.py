"""Layers with J sets of weights on a folded batch: several ways, chosen by shape and device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import prng
from ..kernels.cpu_conv import Pair, grouped, on_cpu, pixels
from .aligned_rows import HAS_TRITON
from .stacked_params import StackedParam


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    piece: StackedParam | None = None,
) -> Tensor:
    """Visit j's images with visit j's filters.

    Args:
        x: [J * B, C, H, W].
        weight: [J, O, C / groups, h, w].
        bias: [J, O] or None.
        piece: of the filters, where they are a parameter.
    """
    plain = groups == 1 and dilation == (1, 1)
    if plain and quick(x) and _outputs(x, weight, stride, padding) < 1 << 31:
        from ..kernels.triton.conv import TritonConvolution

        return TritonConvolution.apply(x, weight, bias, stride, padding, piece)  # type: ignore[no-any-return, no-untyped-call]
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if not x.is_cuda:
        return on_cpu(x, weight, bias, stride, padding, dilation, groups)
    if plain:
        out: Tensor = Im2ColConv.apply(x, weight, stride, padding)  # type: ignore[no-untyped-call]
    else:
        out = grouped(x, weight, stride, padding, dilation, groups)
    return (
        out
        if bias is None
        else out + bias.repeat_interleave(len(x) // len(bias), 0)[:, :, None, None]
    )


def _outputs(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> int:
    """Numbers that a convolution gives for one visit."""
    return len(x) // len(weight) * weight.shape[1] * pixels(x, weight, stride, padding)


def quick(x: Tensor) -> bool:
    """Whether the Triton kernels can take these images."""
    return (
        HAS_TRITON
        and x.is_cuda
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.numel() < 1 << 31
    )


def lstm(given: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [N, T, H] and the last cell of one direction of one LSTM layer; see `LSTMLayer`."""
    if quick(given) and given.dtype == torch.float32:
        from ..kernels.triton.lstm import TritonLSTM

        return TritonLSTM.apply(given, hidden, cell, weight)  # type: ignore[no-any-return, no-untyped-call]
    from ..kernels.fused_lstm import LSTMLayer

    return LSTMLayer.apply(given, hidden, cell, weight)  # type: ignore[no-any-return, no-untyped-call]


def fold(keys: Tensor, word: int | Tensor) -> Tensor:
    """As draws.fold of keys [J] and one word, in one launch."""
    if HAS_TRITON and keys.is_cuda:
        from ..kernels.triton.dropout import fold as quickly

        return quickly(keys, word)
    return torch.as_tensor(prng.fold(keys, word))


def kept(keys: Tensor, size: int, threshold: int) -> Tensor:
    """Which of `size` random numbers at each key [J] reach a threshold, [J, size]."""
    if HAS_TRITON and keys.is_cuda:
        from ..kernels.triton.dropout import kept as quickly

        return quickly(keys, size, threshold)
    return prng.bits(keys, size) >= threshold


def columns(x: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Patches of channels-last images [N, H, W, C] as rows: [N, H', W', h * w * C]."""
    if size == (1, 1) and padding == (0, 0):
        return x[:, :: stride[0], :: stride[1]]
    if padding != (0, 0):
        x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    # [N, H', W', C, h, w], a view
    patches = x.unfold(1, size[0], stride[0]).unfold(2, size[1], stride[1])
    return patches.permute(0, 1, 2, 4, 5, 3).flatten(3)


def _times(patches: Tensor, matrix: Tensor) -> Tensor:
    """[J * B, H', W', D] times [J, D, O]: [J * B, H', W', O]."""
    visits = len(matrix)
    return torch.bmm(patches.reshape(visits, -1, patches.shape[-1]), matrix).reshape(
        *patches.shape[:3], -1
    )


class Im2ColConv(torch.autograd.Function):
    """Convolution as one batched matrix product over patches, in channels-last memory.

    Patches are made again in the backward pass rather than kept: they are h * w times the size of
    the images.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        patches = columns(x.permute(0, 2, 3, 1), weight.shape[3:], stride, padding)  # type: ignore[arg-type]
        matrix = weight.permute(0, 3, 4, 2, 1).flatten(1, 3)  # [J, h * w * C, O]
        return _times(patches, matrix).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        visits, outputs, channels, *size = weight.shape
        stride, padding = ctx.stride, ctx.padding
        back = slope.permute(0, 2, 3, 1)  # [J * B, H', W', O]
        along_weight = along_x = None
        if ctx.needs_input_grad[1]:
            patches = columns(x.permute(0, 2, 3, 1), tuple(size), stride, padding)
            left = patches.reshape(visits, -1, patches.shape[-1]).transpose(1, 2)
            product = torch.bmm(left, back.reshape(visits, -1, outputs))  # [J, h * w * C, O]
            along_weight = product.reshape(visits, *size, channels, outputs).permute(0, 4, 3, 1, 2)
        if ctx.needs_input_grad[0]:
            along_x = _along_images(back, weight, x.shape, stride, padding)
        return along_x, along_weight, None, None


def _along_images(back: Tensor, weight: Tensor, shape: Any, stride: Pair, padding: Pair) -> Tensor:
    """The slope along the images: that of the outputs, spread out by the stride, convolved with the
    turned filters.
    """
    _, _, _, tall, wide = weight.shape
    height, width = shape[2:]
    if stride != (1, 1):
        spread = back.new_zeros(
            len(back),
            (back.shape[1] - 1) * stride[0] + 1,
            (back.shape[2] - 1) * stride[1] + 1,
            back.shape[3],
        )
        spread[:, :: stride[0], :: stride[1]] = back
        back = spread
    # rows and columns of the image beyond the last patch got nothing
    low, high = height + padding[0] - back.shape[1], width + padding[1] - back.shape[2]
    back = F.pad(back, (0, 0, wide - 1 - padding[1], high, tall - 1 - padding[0], low))
    matrix = weight.flip(3, 4).permute(0, 3, 4, 1, 2).flatten(1, 3)  # [J, h * w * O, C]
    return _times(columns(back, (tall, wide), (1, 1), (0, 0)), matrix).permute(0, 3, 1, 2)
