"""Convolutions of J visits, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...stacked.stacked_params import StackedParam
from .conv_weight_grad import conv_weight_grad
from .implicit_gemm import Pair, implicit_gemm


class TritonConvolution(torch.autograd.Function):
    """Convolves the examples of visit j with the filters of visit j.

    Shapes: x [J * B, C, H, W], weight [J, O, C, h, w], bias [J, O]. Matmuls are in the dtype of x.
    The weight gradient is always float32, and is written to the parameter's gradient buffer if it
    has one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Pair,
        padding: Pair,
        param: StackedParam | None,
    ) -> Tensor:
        tall, wide = weight.shape[3:]
        x_last = x.permute(0, 2, 3, 1).contiguous()
        matrix = filter_matrix(param.weight if param is not None else weight, x.dtype)
        ctx.save_for_backward(x_last, matrix)
        ctx.param = param
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
        return implicit_gemm(
            x_last, matrix, bias, out_size, (tall, wide), stride, padding, transposed=False
        )

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        x_last, matrix = ctx.saved_tensors
        (visits, outputs, channels, *size), weight_type, bias_type, stride, padding = ctx.given
        grad_last = grad_output.permute(0, 2, 3, 1).contiguous()
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = implicit_gemm(
                grad_last,
                matrix,
                None,
                tuple(x_last.shape[1:3]),
                tuple(size),
                stride,
                padding,
                transposed=True,
            )
        if ctx.needs_input_grad[1]:
            buffer = None if ctx.param is None else ctx.param.grad_buffer()
            if buffer is not None:
                conv_weight_grad(
                    x_last, grad_last, visits, tuple(size), stride, padding, as_stored(buffer)
                )
            else:
                grad = conv_weight_grad(x_last, grad_last, visits, tuple(size), stride, padding)
                grad_weight = (
                    grad.reshape(visits, *size, channels, outputs)
                    .permute(0, 4, 3, 1, 2)
                    .to(weight_type)
                )
        if bias_type is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_last.reshape(visits, -1, outputs).sum(1, dtype=bias_type)
        return grad_input, grad_weight, grad_bias, None, None, None


def as_stored(filters: Tensor) -> Tensor:
    """Filters [J, O, C, h, w] in storage order: [J, h * w * C, O], a view."""
    return filters.permute(0, 3, 4, 2, 1).flatten(1, 3)


def filter_matrix(filters: Tensor, dtype: torch.dtype) -> Tensor:
    """Filters in storage order and in dtype `dtype`, contiguous per visit."""
    stored = filters.permute(0, 3, 4, 2, 1)
    if stored.dtype == dtype and stored[0].is_contiguous():
        return stored.flatten(1, 3)
    return torch.empty(stored.shape, dtype=dtype, device=stored.device).copy_(stored).flatten(1, 3)
