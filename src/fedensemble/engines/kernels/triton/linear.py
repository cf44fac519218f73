"""Linear layers of J visits; the weight gradient is written in float32 where it belongs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...stacked.stacked_params import StackedParam
from .bias import repeat_bias, sum_rows
from .tiling import block_size, matmul_precision

_MANY_ROWS = 512  # rows per visit from which torch's own matmul is faster


@triton.jit  # type: ignore[untyped-decorator]
def _weight_grad(
    grad_output,
    x,
    out,
    N,
    O,
    I,
    STRIDE,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """out[j, o, i] = sum_n grad_output[j, n, o] x[j, n, i]; visits of `out` are STRIDE apart."""
    j = tl.program_id(2).to(tl.int64)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    grad_output += j * N * O
    x += j * N * I
    total = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        a = tl.load(
            grad_output + n[:, None] * O + o[None, :],
            mask=(n < N)[:, None] & (o < O)[None, :],
            other=0.0,
        )
        b = tl.load(
            x + n[:, None] * I + i[None, :], mask=(n < N)[:, None] & (i < I)[None, :], other=0.0
        )
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    tl.store(
        out + j * STRIDE + o[:, None] * I + i[None, :],
        total,
        mask=(o < O)[:, None] & (i < I)[None, :],
    )


class StackedLinear(torch.autograd.Function):
    """x [J, n, I] times weights [J, O, I], plus bias [J, O] or None.

    Args:
        weight: the parameter itself, for autograd; matmuls read `param.weight`.
        bias_param: of the bias, where it is a parameter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        param: StackedParam,
        bias_param: StackedParam | None,
    ) -> Tensor:
        cast_weight = param.weight
        ctx.save_for_backward(x, cast_weight)
        ctx.param, ctx.bias_type = param, None if bias is None else bias.dtype
        ctx.bias_param = bias_param
        if bias is None:
            return torch.bmm(x, cast_weight.transpose(1, 2))
        # In a matrix of parameters the last dimension is contiguous, elsewhere it may not be.
        given = bias if bias.stride(1) == 1 else bias.contiguous()
        out = repeat_bias(given, x.shape[1], x.dtype)
        return out.baddbmm_(x, cast_weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        x, cast_weight = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_input = torch.bmm(grad_output, cast_weight) if ctx.needs_input_grad[0] else None
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            buffer = ctx.param.grad_buffer()
            if buffer is None or grad_output.shape[1] >= _MANY_ROWS:
                product = torch.bmm(grad_output.transpose(1, 2), x)
                if buffer is None:
                    grad_weight = product.float()
                else:
                    buffer.copy_(product)
            else:
                _write_weight_grad(grad_output, x.contiguous(), buffer)
        if ctx.bias_type is not None and ctx.needs_input_grad[2]:
            buffer = None if ctx.bias_param is None else ctx.bias_param.grad_buffer()
            sums = sum_rows(grad_output, buffer)
            grad_bias = sums.to(ctx.bias_type) if buffer is None else None
        return grad_input, grad_weight, grad_bias, None, None


def _write_weight_grad(grad_output: Tensor, x: Tensor, out: Tensor) -> None:
    visits, rows, outputs = grad_output.shape
    inputs = x.shape[2]
    block_o, block_i = block_size(outputs, 64), block_size(inputs, 128)
    grid = (triton.cdiv(inputs, block_i), triton.cdiv(outputs, block_o), visits)
    _weight_grad[grid](
        grad_output,
        x,
        out,
        rows,
        outputs,
        inputs,
        out.stride(0),
        PRECISION=matmul_precision(),
        BLOCK_N=block_size(rows, 32),
        BLOCK_O=block_o,
        BLOCK_I=block_i,
        num_warps=4,
        num_stages=2,
    )
