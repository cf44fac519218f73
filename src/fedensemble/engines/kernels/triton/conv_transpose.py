"""Transposed convolutions of J visits, by the kernels of convolutions.

A transposed convolution is the input gradient of a convolution with the same filters, and its own
input gradient is that convolution. So forward and backward pass exchange their kernels, and in the
weight gradient images and output gradients exchange their places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...stacked.stacked_params import StackedParam
from .conv import as_stored, filter_matrix
from .conv_weight_grad import conv_weight_grad
from .implicit_gemm import Pair, implicit_gemm


class TritonConvTranspose(torch.autograd.Function):
    """Transposed convolution of the examples of visit j with the filters of visit j.

    Shapes: x [J * B, C, H, W], weight [J, C, O, h, w], bias [J, O]. The rest is as in
    `TritonConvolution`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Pair,
        padding: Pair,
        output_padding: Pair,
        param: StackedParam | None,
    ) -> Tensor:
        size = (weight.shape[3], weight.shape[4])
        x_last = x.permute(0, 2, 3, 1).contiguous()
        # [J, h * w * O, C]: the matrix of the convolution that this one is the gradient of.
        matrix = filter_matrix(param.weight if param is not None else weight, x.dtype)
        ctx.save_for_backward(x_last, matrix)
        ctx.param = param
        bias_type = None if bias is None else bias.dtype
        ctx.given = (weight.shape, weight.dtype, bias_type, stride, padding)
        height, width = (
            (x.shape[2 + n] - 1) * stride[n] - 2 * padding[n] + size[n] + output_padding[n]
            for n in (0, 1)
        )
        return implicit_gemm(
            x_last, matrix, bias, (height, width), size, stride, padding, transposed=True
        )

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        x_last, matrix = ctx.saved_tensors
        (visits, channels, outputs, *sides), weight_type, bias_type, stride, padding = ctx.given
        size = (sides[0], sides[1])
        grad_last = grad_output.permute(0, 2, 3, 1).contiguous()
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            in_size = (x_last.shape[1], x_last.shape[2])
            grad_input = implicit_gemm(
                grad_last, matrix, None, in_size, size, stride, padding, transposed=False
            )
        if ctx.needs_input_grad[1]:
            buffer = None if ctx.param is None else ctx.param.grad_buffer()
            out = None if buffer is None else as_stored(buffer)
            grad = conv_weight_grad(grad_last, x_last, visits, size, stride, padding, out)
            if buffer is None:
                grad_weight = (
                    grad.reshape(visits, *size, outputs, channels)
                    .permute(0, 4, 3, 1, 2)
                    .to(weight_type)
                )
        if bias_type is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_last.reshape(visits, -1, outputs).sum(1, dtype=bias_type)
        return grad_input, grad_weight, grad_bias, None, None, None, None
