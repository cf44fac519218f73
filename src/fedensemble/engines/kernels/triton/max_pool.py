"""Max-pooling with non-overlapping windows, in channels-last memory format.

torch's backward pass takes longer than a convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiling import empty_channels_last

_BLOCK = 1024
_LARGE = 1 << 31  # pixels from which places need 64 bits, which are slower to work out


@triton.jit  # type: ignore[untyped-decorator]
def _update_max(
    corner, step, best, index, real, W: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr
):
    """The maximum so far or the window's value at `step`, and its index."""
    value = tl.load(corner + ((step // SIZE) * W + step % SIZE) * C, mask=real, other=0.0)
    larger = (value > best) | (value != value)  # nan is passed on, as torch does
    return tl.where(larger, value, best), tl.where(larger, step, index).to(index.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _forward(
    x,
    out,
    argmax,
    TOTAL,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    LARGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The maximum of each window, and its index in the window."""
    at = (tl.program_id(0).to(tl.int64) if LARGE else tl.program_id(0)) * BLOCK + tl.arange(
        0, BLOCK
    )
    c, rest = at % C, at // C
    ox, rest = rest % OW, rest // OW
    oy, n = rest % OH, rest // OH
    corner = x + ((n * H + oy * STEP) * W + ox * STEP) * C + c
    best = tl.load(corner, mask=at < TOTAL, other=0.0)
    index = tl.zeros((BLOCK,), dtype=argmax.dtype.element_ty)
    if SIZE <= 4:
        for step in tl.static_range(1, SIZE * SIZE):
            best, index = _update_max(corner, step, best, index, at < TOTAL, W, C, SIZE)
    else:  # a long program would take minutes to compile
        for step in range(1, SIZE * SIZE):
            best, index = _update_max(corner, step, best, index, at < TOTAL, W, C, SIZE)
    tl.store(out + at, best, mask=at < TOTAL)
    tl.store(argmax + at, index, mask=at < TOTAL)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(
    grad_output,
    argmax,
    out,
    TOTAL,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    LARGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of a window goes to the pixel that was its maximum."""
    at = (tl.program_id(0).to(tl.int64) if LARGE else tl.program_id(0)) * BLOCK + tl.arange(
        0, BLOCK
    )
    c, rest = at % C, at // C
    ix, rest = rest % W, rest // W
    iy, n = rest % H, rest // H
    oy, ox = iy // STEP, ix // STEP
    inside = (at < TOTAL) & (oy < OH) & (ox < OW) & (iy % STEP < SIZE) & (ix % STEP < SIZE)
    window = ((n * OH + oy) * OW + ox) * C + c
    is_max = tl.load(argmax + window, mask=inside, other=-1) == (iy % STEP) * SIZE + ix % STEP
    tl.store(
        out + at, tl.load(grad_output + window, mask=inside & is_max, other=0.0), mask=at < TOTAL
    )


class TritonMaxPool2d(torch.autograd.Function):
    """F.max_pool2d(x, size, step) with step >= size and no padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, step: int) -> Tensor:
        x_last = x.permute(0, 2, 3, 1).contiguous()
        n, height, width, channels = x_last.shape
        out = empty_channels_last(
            x_last, (n, channels, (height - size) // step + 1, (width - size) // step + 1)
        )
        index_type = torch.int8 if size * size <= 128 else torch.int32
        argmax = torch.empty(out.numel(), dtype=index_type, device=x.device)
        ctx.save_for_backward(argmax)
        ctx.shape = x_last.shape
        ctx.sizes = {"SIZE": size, "STEP": step, "LARGE": x_last.numel() >= _LARGE, "BLOCK": _BLOCK}
        grid = (triton.cdiv(out.numel(), _BLOCK),)
        _forward[grid](
            x_last, out, argmax, out.numel(), *x_last.shape[1:], *out.shape[2:], **ctx.sizes
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (argmax,) = ctx.saved_tensors
        grad_last = grad_output.permute(0, 2, 3, 1).contiguous()
        out = grad_last.new_empty(ctx.shape)
        grid = (triton.cdiv(out.numel(), _BLOCK),)
        _backward[grid](
            grad_last, argmax, out, out.numel(), *out.shape[1:], *grad_last.shape[1:3], **ctx.sizes
        )
        return out.permute(0, 3, 1, 2), None, None
