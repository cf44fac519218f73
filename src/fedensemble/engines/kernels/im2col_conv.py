"""Convolution of stacked models as batched matmuls over patches, for GPUs without Triton."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu_conv import Pair


def im2col(x: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Patches of channels-last images [N, H, W, C] as rows: [N, H', W', h * w * C]."""
    if size == (1, 1) and padding == (0, 0):
        return x[:, :: stride[0], :: stride[1]]
    if padding != (0, 0):
        x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    # [N, H', W', C, h, w], a view
    patches = x.unfold(1, size[0], stride[0]).unfold(2, size[1], stride[1])
    return patches.permute(0, 1, 2, 4, 5, 3).flatten(3)


def _matmul_per_visit(patches: Tensor, matrix: Tensor) -> Tensor:
    """[J * B, H', W', D] times [J, D, O]: [J * B, H', W', O]."""
    rows = patches.reshape(len(matrix), -1, patches.shape[-1])
    return torch.bmm(rows, matrix).reshape(*patches.shape[:3], -1)


class Im2ColConv(torch.autograd.Function):
    """Convolution as one batched matmul over patches, in channels-last memory format.

    Patches are h * w times the size of the images, so the backward pass computes them again instead
    of keeping them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        patches = im2col(x.permute(0, 2, 3, 1), weight.shape[3:], stride, padding)  # type: ignore[arg-type]
        matrix = weight.permute(0, 3, 4, 2, 1).flatten(1, 3)  # [J, h * w * C, O]
        return _matmul_per_visit(patches, matrix).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        visits, outputs, channels, *size = weight.shape
        stride, padding = ctx.stride, ctx.padding
        grad_output = grad_output.permute(0, 2, 3, 1)  # [J * B, H', W', O]
        grad_input = grad_weight = None
        if ctx.needs_input_grad[1]:
            patches = im2col(x.permute(0, 2, 3, 1), tuple(size), stride, padding)
            left = patches.reshape(visits, -1, patches.shape[-1]).transpose(1, 2)
            grad = torch.bmm(left, grad_output.reshape(visits, -1, outputs))  # [J, h * w * C, O]
            grad_weight = grad.reshape(visits, *size, channels, outputs).permute(0, 4, 3, 1, 2)
        if ctx.needs_input_grad[0]:
            grad_input = _conv_grad_input(grad_output, weight, x.shape, stride, padding)
        return grad_input, grad_weight, None, None


def _conv_grad_input(
    grad_output: Tensor, weight: Tensor, shape: Any, stride: Pair, padding: Pair
) -> Tensor:
    """The gradient w.r.t. the input: `grad_output`, dilated by the stride, convolved with the
    flipped filters.
    """
    _, _, _, tall, wide = weight.shape
    height, width = shape[2:]
    grad = grad_output
    if stride != (1, 1):
        rows = (grad.shape[1] - 1) * stride[0] + 1
        columns = (grad.shape[2] - 1) * stride[1] + 1
        dilated = grad.new_zeros(len(grad), rows, columns, grad.shape[3])
        dilated[:, :: stride[0], :: stride[1]] = grad
        grad = dilated
    # Rows and columns of the input beyond the last patch get no gradient: pad with zeros there.
    low, high = height + padding[0] - grad.shape[1], width + padding[1] - grad.shape[2]
    grad = F.pad(grad, (0, 0, wide - 1 - padding[1], high, tall - 1 - padding[0], low))
    matrix = weight.flip(3, 4).permute(0, 3, 4, 1, 2).flatten(1, 3)  # [J, h * w * O, C]
    patches = im2col(grad, (tall, wide), (1, 1), (0, 0))
    return _matmul_per_visit(patches, matrix).permute(0, 3, 1, 2)
