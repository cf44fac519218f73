"""Convolutions with J sets of weights as Triton kernels, with their slopes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...stacked.stacked_params import StackedParam
from .conv_weight_grad import along_weights
from .implicit_gemm import Pair, products


class TritonConvolution(torch.autograd.Function):
    """Visit j's images with visit j's filters: x [J * B, C, H, W], weight [J, O, C, h, w], bias [J,
    O].

    Products are in the type of x; the slope of the weights comes in float32, whatever that is, and
    goes to its piece's place if there is one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Pair,
        padding: Pair,
        piece: StackedParam | None,
    ) -> Tensor:
        tall, wide = weight.shape[3:]
        last = x.permute(0, 2, 3, 1).contiguous()
        matrix = _matrix(piece.weight if piece is not None else weight, x.dtype)
        ctx.save_for_backward(last, matrix)
        ctx.piece = piece
        ctx.given = (
            weight.shape,
            weight.dtype,
            None if bias is None else bias.dtype,
            stride,
            padding,
        )
        out_size = (
            (x.shape[2] + 2 * padding[0] - tall) // stride[0] + 1,
            (x.shape[3] + 2 * padding[1] - wide) // stride[1] + 1,
        )
        return products(last, matrix, bias, out_size, (tall, wide), stride, padding, turned=False)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        last, matrix = ctx.saved_tensors
        (visits, outputs, channels, *size), weight_type, bias_type, stride, padding = ctx.given
        back = slope.permute(0, 2, 3, 1).contiguous()
        along_x = along_weight = along_bias = None
        if ctx.needs_input_grad[0]:
            along_x = products(
                back,
                matrix,
                None,
                tuple(last.shape[1:3]),
                tuple(size),
                stride,
                padding,
                turned=True,
            )
        if ctx.needs_input_grad[1]:
            place = None if ctx.piece is None else ctx.piece.grad_buffer()
            if place is not None:
                along_weights(last, back, visits, tuple(size), stride, padding, _stored(place))
            else:
                found = along_weights(last, back, visits, tuple(size), stride, padding)
                along_weight = (
                    found.reshape(visits, *size, channels, outputs)
                    .permute(0, 4, 3, 1, 2)
                    .to(weight_type)
                )
        if bias_type is not None and ctx.needs_input_grad[2]:
            along_bias = back.reshape(visits, -1, outputs).sum(1, dtype=bias_type)
        return along_x, along_weight, along_bias, None, None, None


def _stored(filters: Tensor) -> Tensor:
    """Filters [J, O, C, h, w] as they lie in a weight vector: [J, h * w * C, O], a view."""
    return filters.permute(0, 3, 4, 2, 1).flatten(1, 3)


def _matrix(filters: Tensor, dtype: torch.dtype) -> Tensor:
    """The same as the kernels take it: each visit's in one piece, in the type of products."""
    lying = filters.permute(0, 3, 4, 2, 1)
    if lying.dtype == dtype and lying[0].is_contiguous():
        return lying.flatten(1, 3)
    return torch.empty(lying.shape, dtype=dtype, device=lying.device).copy_(lying).flatten(1, 3)
