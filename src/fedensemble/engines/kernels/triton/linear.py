"""Linear layers with J sets of weights on a GPU: the slope of the weights goes straight to its
place, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...stacked.stacked_params import StackedParam
from .tiling import precision, tile

_MANY = 512  # rows a visit from which torch's own product is the better one


@triton.jit  # type: ignore[untyped-decorator]
def _outer(
    slope,
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
    """out[j, o, i] = sum_n slope[j, n, o] x[j, n, i]; visits of `out` lie STRIDE apart."""
    j = tl.program_id(2).to(tl.int64)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    slope += j * N * O
    x += j * N * I
    total = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        a = tl.load(
            slope + n[:, None] * O + o[None, :], mask=(n < N)[:, None] & (o < O)[None, :], other=0.0
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
        weight: the parameter itself; products read `piece.weight`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, piece: StackedParam
    ) -> Tensor:
        read = piece.weight
        ctx.save_for_backward(x, read)
        ctx.piece, ctx.bias_type = piece, None if bias is None else bias.dtype
        if bias is None:
            return torch.bmm(x, read.transpose(1, 2))
        return torch.baddbmm(bias.unsqueeze(1).to(x.dtype), x, read.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, read = ctx.saved_tensors
        slope = slope.contiguous()
        along_x = torch.bmm(slope, read) if ctx.needs_input_grad[0] else None
        along_weight = along_bias = None
        if ctx.needs_input_grad[1]:
            place = ctx.piece.grad_buffer()
            if place is None or slope.shape[1] >= _MANY:
                along_weight = torch.bmm(slope.transpose(1, 2), x).float()
                if place is not None:
                    place.copy_(along_weight)
                    along_weight = None
            else:
                _outer_products(slope, x.contiguous(), place)
        if ctx.bias_type is not None and ctx.needs_input_grad[2]:
            along_bias = slope.sum(1, dtype=ctx.bias_type)
        return along_x, along_weight, along_bias, None


def _outer_products(slope: Tensor, x: Tensor, out: Tensor) -> None:
    visits, rows, outputs = slope.shape
    inputs = x.shape[2]
    block_o, block_i = tile(outputs, 64), tile(inputs, 128)
    grid = (triton.cdiv(inputs, block_i), triton.cdiv(outputs, block_o), visits)
    _outer[grid](
        slope,
        x,
        out,
        rows,
        outputs,
        inputs,
        out.stride(0),
        PRECISION=precision(),
        BLOCK_N=tile(rows, 32),
        BLOCK_O=block_o,
        BLOCK_I=block_i,
        num_warps=4,
        num_stages=2,
    )
