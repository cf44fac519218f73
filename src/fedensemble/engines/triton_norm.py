"""BatchNorm with J sets of statistics, channels last: two passes over the images forward, two backward.

y = (x - mean_jc) / sqrt(var_jc + eps) * weight_jc + bias_jc, mean and variance over a visit's own batch and pixels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _sums(x, slope, mean, out, ROWS, C, SHARE, SPLIT, BACK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sums by channel over a share of a visit's rows: of x - mean and its square, or slope and slope * (x - mean)."""
    j = tl.program_id(2).to(tl.int64)
    split = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = c < C
    x += j * ROWS * C
    slope += j * ROWS * C
    centre = tl.load(mean + j * C + c, mask=real, other=0.0)
    first, second = tl.zeros((BLOCK_C,), dtype=tl.float32), tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in range(split * SHARE, min((split + 1) * SHARE, ROWS), BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        inside = (rows < min((split + 1) * SHARE, ROWS))[:, None] & real[None, :]
        at = rows[:, None] * C + c[None, :]
        far = tl.where(inside, tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - centre[None, :], 0.0)
        if BACK:
            along = tl.load(slope + at, mask=inside, other=0.0).to(tl.float32)
            first += tl.sum(along, 0)
            second += tl.sum(along * far, 0)
        else:
            first += tl.sum(far, 0)
            second += tl.sum(far * far, 0)
    place = out + ((split * tl.num_programs(2) + j) * 2) * C + c
    tl.store(place, first, mask=real)
    tl.store(place + C, second, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _apply(x, slope, a, b, d, out, ROWS, C, BACK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Out = a x + d, or out = a slope + b x + d, with numbers by visit and channel."""
    j = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = c < C
    inside = (rows < ROWS)[:, None] & real[None, :]
    at = j * ROWS * C + rows[:, None] * C + c[None, :]
    by_a = tl.load(a + j * C + c, mask=real, other=0.0)[None, :]
    plus = tl.load(d + j * C + c, mask=real, other=0.0)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        along = tl.load(slope + at, mask=inside, other=0.0).to(tl.float32)
        value = by_a * along + tl.load(b + j * C + c, mask=real, other=0.0)[None, :] * value + plus
    else:
        value = by_a * value + plus
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def _shape(rows: int, channels: int, visits: int) -> tuple[int, int, int, int]:
    """Rows and channels of a tile, and into how many shares rows are cut, and their length."""
    block_c = max(8, min(64, triton.next_power_of_2(channels)))
    block_r = 4096 // block_c
    wanted = max(1, 512 // (visits * triton.cdiv(channels, block_c)))
    split = max(1, min(wanted, rows // block_r))
    return block_r, block_c, split, triton.cdiv(triton.cdiv(rows, split), block_r) * block_r


def _reduced(x: Tensor, slope: Tensor, mean: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """The two sums by visit and channel, [J, C]."""
    visits, rows, channels = x.shape
    block_r, block_c, split, share = _shape(rows, channels, visits)
    out = torch.empty(split, visits, 2, channels, dtype=torch.float32, device=x.device)
    grid = (split, triton.cdiv(channels, block_c), visits)
    _sums[grid](x, slope, mean, out, rows, channels, share, split, BACK=back, BLOCK_R=block_r, BLOCK_C=block_c)
    total = out.sum(0)
    return total[:, 0], total[:, 1]


def _applied(x: Tensor, slope: Tensor, a: Tensor, b: Tensor, d: Tensor, back: bool) -> Tensor:
    visits, rows, channels = x.shape
    block_r, block_c, _, _ = _shape(rows, channels, visits)
    out = torch.empty_like(x)
    grid = (triton.cdiv(rows, block_r), triton.cdiv(channels, block_c), visits)
    _apply[grid](x, slope, a, b, d, out, rows, channels, BACK=back, BLOCK_R=block_r, BLOCK_C=block_c)
    return out


class StackedBatchNorm(torch.autograd.Function):
    """Normalised images, and the mean and (biased) variance of each visit's batch.

    Args:
        x: [J * B, C, ...].
        weight, bias: [J, C], float32.
        guess: something near the means, such as the running means [J, C]: sums of squares are taken about it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, guess: Tensor, eps: float) -> Any:
        visits, channels = weight.shape
        last = x.movedim(1, -1).contiguous()
        flat = last.reshape(visits, -1, channels)
        rows = flat.shape[1]
        guess = guess.contiguous()
        first, second = _reduced(flat, flat, guess, back=False)
        near = first / rows
        mean, variance = guess + near, (second / rows - near**2).clamp(min=0)
        scale = torch.rsqrt(variance + eps)
        factor = (scale * weight).contiguous()
        out = _applied(flat, flat, factor, factor, (bias - mean * factor).contiguous(), back=False)
        ctx.save_for_backward(flat, weight, mean, scale)
        ctx.shape = last.shape
        ctx.mark_non_differentiable(mean, variance)
        return out.reshape(last.shape).movedim(-1, 1), mean, variance

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Any) -> Any:
        flat, weight, mean, scale = ctx.saved_tensors
        along = slope.movedim(1, -1).contiguous().reshape(flat.shape)
        rows = flat.shape[1]
        total, weighted = _reduced(flat, along, mean, back=True)  # sums of slope and of slope * (x - mean)
        along_weight = weighted * scale
        a = (weight * scale).contiguous()
        b = (-a * scale * along_weight / rows).contiguous()
        d = (-a * total / rows - b * mean).contiguous()
        out = _applied(flat, along, a, b, d, back=True)
        return out.reshape(ctx.shape).movedim(-1, 1), along_weight, total, None, None
