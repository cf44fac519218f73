"""Max-pooling over squares that do not overlap, channels last: torch's own was slower than a
convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiling import images_like

_BLOCK = 1024
_LARGE = 1 << 31  # pixels from which places need 64 bits, which are slower to work out


@triton.jit  # type: ignore[untyped-decorator]
def _larger(corner, step, best, place, real, W: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr):
    """The best so far or the square's number at `step`, and its place."""
    value = tl.load(corner + ((step // SIZE) * W + step % SIZE) * C, mask=real, other=0.0)
    more = (value > best) | (value != value)  # nan is passed on, as torch does
    return tl.where(more, value, best), tl.where(more, step, place).to(place.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _largest(
    x,
    out,
    which,
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
    """The largest of each square, and its place in the square."""
    at = (tl.program_id(0).to(tl.int64) if LARGE else tl.program_id(0)) * BLOCK + tl.arange(
        0, BLOCK
    )
    c, rest = at % C, at // C
    ox, rest = rest % OW, rest // OW
    oy, n = rest % OH, rest // OH
    corner = x + ((n * H + oy * STEP) * W + ox * STEP) * C + c
    best = tl.load(corner, mask=at < TOTAL, other=0.0)
    place = tl.zeros((BLOCK,), dtype=which.dtype.element_ty)
    if SIZE <= 4:
        for step in tl.static_range(1, SIZE * SIZE):
            best, place = _larger(corner, step, best, place, at < TOTAL, W, C, SIZE)
    else:  # a long program would take minutes to compile
        for step in range(1, SIZE * SIZE):
            best, place = _larger(corner, step, best, place, at < TOTAL, W, C, SIZE)
    tl.store(out + at, best, mask=at < TOTAL)
    tl.store(which + at, place, mask=at < TOTAL)


@triton.jit  # type: ignore[untyped-decorator]
def _back(
    slope,
    which,
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
    """Each pixel asks its square, if it is in one, whether it was the largest."""
    at = (tl.program_id(0).to(tl.int64) if LARGE else tl.program_id(0)) * BLOCK + tl.arange(
        0, BLOCK
    )
    c, rest = at % C, at // C
    ix, rest = rest % W, rest // W
    iy, n = rest % H, rest // H
    oy, ox = iy // STEP, ix // STEP
    inside = (at < TOTAL) & (oy < OH) & (ox < OW) & (iy % STEP < SIZE) & (ix % STEP < SIZE)
    square = ((n * OH + oy) * OW + ox) * C + c
    mine = tl.load(which + square, mask=inside, other=-1) == (iy % STEP) * SIZE + ix % STEP
    tl.store(out + at, tl.load(slope + square, mask=inside & mine, other=0.0), mask=at < TOTAL)


class TritonMaxPool2d(torch.autograd.Function):
    """F.max_pool2d(x, size, step) with step >= size and no padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, step: int) -> Tensor:
        last = x.permute(0, 2, 3, 1).contiguous()
        n, height, width, channels = last.shape
        out = images_like(
            last, (n, channels, (height - size) // step + 1, (width - size) // step + 1)
        )
        place_type = torch.int8 if size * size <= 128 else torch.int32
        which = torch.empty(out.numel(), dtype=place_type, device=x.device)
        ctx.save_for_backward(which)
        ctx.shape = last.shape
        ctx.sizes = {"SIZE": size, "STEP": step, "LARGE": last.numel() >= _LARGE, "BLOCK": _BLOCK}
        grid = (triton.cdiv(out.numel(), _BLOCK),)
        _largest[grid](last, out, which, out.numel(), *last.shape[1:], *out.shape[2:], **ctx.sizes)
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        (which,) = ctx.saved_tensors
        back = slope.permute(0, 2, 3, 1).contiguous()
        out = back.new_empty(ctx.shape)
        grid = (triton.cdiv(out.numel(), _BLOCK),)
        _back[grid](back, which, out, out.numel(), *out.shape[1:], *back.shape[1:3], **ctx.sizes)
        return out.permute(0, 3, 1, 2), None, None
