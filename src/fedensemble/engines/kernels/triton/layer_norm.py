"""LayerNorm and RMSNorm of J visits: normalization, scale and shift in one pass.

The backward pass is one pass, too: a program goes through some rows of a visit, writes their
gradient, and adds up the gradients of scale and shift; the sums of all programs are added in a
fixed order, so that the same run gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...stacked.stacked_params import StackedParam

MAX_SIZE = 4096  # numbers of a row that one program can hold
_TILE = 2048  # numbers of a tile
_PROGRAMS = 528  # four per multiprocessor of an H200


@triton.jit  # type: ignore[untyped-decorator]
def _forward(
    x,
    weight,
    bias,
    out,
    means,
    scales,
    rows,
    eps,
    W_STRIDE,
    BIAS_STRIDE,
    D: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Normalized rows [J, rows, D], times weights [J, D], plus biases [J, D]."""
    j = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    real = (row < rows)[:, None] & (d < D)[None, :]
    at = (j * rows + row)[:, None] * D + d[None, :]
    value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if CENTERED:
        mean = tl.sum(value, axis=1) / D
        tl.store(means + j * rows + row, mean, mask=row < rows)
        value = tl.where(real, value - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / D + eps)
    tl.store(scales + j * rows + row, scale, mask=row < rows)
    factor = tl.load(weight + j * W_STRIDE + d, mask=d < D, other=0.0).to(tl.float32)
    value = value * scale[:, None] * factor[None, :]
    if HAS_BIAS:
        shift = tl.load(bias + j * BIAS_STRIDE + d, mask=d < D, other=0.0).to(tl.float32)
        value += shift[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(
    grad_output,
    x,
    weight,
    means,
    scales,
    grad_input,
    partial_sums,
    rows,
    SPLIT_ROWS,
    W_STRIDE,
    D: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The gradient of a split's rows, and its sums for weight and bias, [splits, J, 2, D]."""
    split, j = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    factor = tl.load(weight + j * W_STRIDE + d, mask=d < D, other=0.0).to(tl.float32)
    for_weight = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    for_bias = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    for first in range(split * SPLIT_ROWS, tl.minimum((split + 1) * SPLIT_ROWS, rows), BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        inside = row < rows
        real = inside[:, None] & (d < D)[None, :]
        at = (j * rows + row)[:, None] * D + d[None, :]
        value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        grad = tl.load(grad_output + at, mask=real, other=0.0).to(tl.float32)
        scale = tl.load(scales + j * rows + row, mask=inside, other=0.0)
        if CENTERED:
            mean = tl.load(means + j * rows + row, mask=inside, other=0.0)
            value = tl.where(real, value - mean[:, None], 0.0)
        value *= scale[:, None]
        for_weight += grad * value
        for_bias += grad
        grad *= factor[None, :]
        along = tl.sum(grad * value, axis=1) / D
        out = grad - value * along[:, None]
        if CENTERED:
            out -= (tl.sum(grad, axis=1) / D)[:, None]
        out *= scale[:, None]
        tl.store(grad_input + at, out.to(grad_input.dtype.element_ty), mask=real)
    place = partial_sums + (split * tl.num_programs(1) + j) * 2 * D + d
    tl.store(place, tl.sum(for_weight, axis=0), mask=d < D)
    tl.store(place + D, tl.sum(for_bias, axis=0), mask=d < D)


class StackedLayerNorm(torch.autograd.Function):
    """LayerNorm, or RMSNorm if not `centered`, of rows [J, n, D].

    Args:
        weight, bias: [J, D]; the bias may be None.
        params: of weight and bias.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centered: bool,
        params: tuple[StackedParam | None, StackedParam | None],
    ) -> Tensor:
        visits, rows, size = x.shape
        x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scales = torch.empty(visits, rows, dtype=torch.float32, device=x.device)
        means = torch.empty_like(scales) if centered else scales
        block_d = triton.next_power_of_2(size)
        tile = {"D": size, "CENTERED": centered, "BLOCK_D": block_d}
        tile["BLOCK_R"] = max(1, _TILE // block_d)
        _forward[(triton.cdiv(rows, tile["BLOCK_R"]), visits)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            means,
            scales,
            rows,
            eps,
            weight.stride(0),
            0 if bias is None else bias.stride(0),
            HAS_BIAS=bias is not None,
            **tile,
            num_warps=4,
        )
        ctx.save_for_backward(x, weight, means, scales)
        ctx.tile, ctx.params, ctx.has_bias = tile, params, bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        x, weight, means, scales = ctx.saved_tensors
        visits, rows, size = x.shape
        block = ctx.tile["BLOCK_R"]
        split = max(1, min(triton.cdiv(_PROGRAMS, visits), triton.cdiv(rows, 2 * block)))
        split_rows = triton.cdiv(triton.cdiv(rows, split), block) * block
        split = triton.cdiv(rows, split_rows)  # so that each has rows
        partial_sums = torch.empty(split, visits, 2, size, dtype=torch.float32, device=x.device)
        grad_input = torch.empty_like(x)
        _backward[(split, visits)](
            grad_output.contiguous(),
            x,
            weight,
            means,
            scales,
            grad_input,
            partial_sums,
            rows,
            split_rows,
            weight.stride(0),
            **ctx.tile,
            num_warps=4,
        )
        grads: list[Tensor | None] = [None, None]
        for n, param in enumerate(ctx.params[: 1 + ctx.has_bias]):
            if ctx.needs_input_grad[1 + n]:
                buffer = None if param is None else param.grad_buffer()
                if buffer is None:
                    grads[n] = partial_sums[:, :, n].sum(0).to(weight.dtype)
                else:
                    torch.sum(partial_sums[:, :, n], 0, out=buffer.flatten(1))
        return grad_input, *grads, None, None, None
