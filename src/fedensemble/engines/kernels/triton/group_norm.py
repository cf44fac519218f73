"""Per-example, per-channel GroupNorm statistics and their gradients.

Partial sums are per example and channel; statistics are over the channels of a group, weight
gradients over the examples of a visit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .norm_reductions import locate


@triton.jit  # type: ignore[untyped-decorator]
def _channels(C, G, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program's example, the number of examples, its channels [groups, channels per group], and
    which of them exist.
    """
    n, examples, group, _ = locate(1, G, BLOCK_G, True)
    inside = tl.arange(0, BLOCK_C)[None, :]
    return n, examples, group[:, None] * (C // G) + inside, (group < G)[:, None] & (inside < C // G)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_splits(
    partial_sums, SPLIT, C, n, examples, c, real, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The two sums of an example over all splits."""
    first = tl.zeros((BLOCK_G, BLOCK_C), dtype=tl.float32)
    second = tl.zeros((BLOCK_G, BLOCK_C), dtype=tl.float32)
    for split in range(SPLIT):
        place = partial_sums + (split * examples + n) * 2 * C + c
        first += tl.load(place, mask=real, other=0.0)
        second += tl.load(place + C, mask=real, other=0.0)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(
    partial_sums,
    x,
    weight,
    bias,
    out,
    ROWS,
    C,
    G,
    SPLIT,
    BATCH,
    WEIGHT,
    BIAS,
    EPS,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Out [4, N, C]: mean, 1 / std, factor and shift of x.

    The channels of a group are combined by their distance from the group's first value, because
    squares of values far from 0 would cancel. Rows of weight and bias are WEIGHT and BIAS elements
    apart.
    """
    n, examples, c, real = _channels(C, G, BLOCK_G, BLOCK_C)
    first, second = _sum_splits(partial_sums, SPLIT, C, n, examples, c, real, BLOCK_G, BLOCK_C)
    start = tl.load(x + n * ROWS * C + c, mask=real, other=0.0).to(tl.float32)
    lone = tl.arange(0, BLOCK_C)[None, :] == 0
    about = tl.sum(tl.where(lone, start, 0.0), 1)[:, None]
    near = first / ROWS
    far = start - about + near  # of a channel's mean
    middle = tl.sum(tl.where(real, far, 0.0), 1)[:, None] / (C // G)
    spread = tl.maximum(second / ROWS - near * near, 0.0) + (far - middle) * (far - middle)
    var = tl.sum(tl.where(real, spread, 0.0), 1)[:, None] / (C // G)
    center = tl.broadcast_to(about + middle, (BLOCK_G, BLOCK_C))
    scale = tl.broadcast_to(1.0 / tl.sqrt(var + EPS), (BLOCK_G, BLOCK_C))
    j = n // BATCH
    factor = scale * tl.load(weight + j * WEIGHT + c, mask=real, other=0.0)
    place, each = out + n * C + c, examples.to(tl.int64) * C
    tl.store(place, center, mask=real)
    tl.store(place + each, scale, mask=real)
    tl.store(place + 2 * each, factor, mask=real)
    tl.store(
        place + 3 * each,
        tl.load(bias + j * BIAS + c, mask=real, other=0.0) - center * factor,
        mask=real,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _input_grad_terms(
    partial_sums, statistics, out, ROWS, C, G, SPLIT, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Out [2, N, C]: b and d of the input gradient, factor grad_output + b x + d."""
    n, examples, c, real = _channels(C, G, BLOCK_G, BLOCK_C)
    total, weighted = _sum_splits(partial_sums, SPLIT, C, n, examples, c, real, BLOCK_G, BLOCK_C)
    each, count = examples.to(tl.int64) * C, ROWS * (C // G)
    mean = tl.load(statistics + n * C + c, mask=real, other=0.0)
    scale = tl.load(statistics + each + n * C + c, mask=real, other=0.0)
    factor = tl.load(statistics + 2 * each + n * C + c, mask=real, other=0.0)
    b = -scale * scale * (tl.sum(factor * weighted, 1)[:, None] / count)
    tl.store(out + n * C + c, b, mask=real)
    tl.store(
        out + each + n * C + c, -(tl.sum(factor * total, 1)[:, None] / count) - b * mean, mask=real
    )


@triton.jit  # type: ignore[untyped-decorator]
def _weight_grads(
    partial_sums,
    scale,
    grad_weight,
    grad_bias,
    C,
    SPLIT,
    BATCH,
    GRAD_WEIGHT,
    GRAD_BIAS,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Gradients of weight and bias: sums over all examples of a visit, in a fixed order."""
    j, visits, c, _ = locate(1, C, BLOCK_C, True)
    first = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float32)
    second = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float32)
    for start in range(0, SPLIT * BATCH, BLOCK_B):
        part = start + tl.arange(0, BLOCK_B)
        there = (part < SPLIT * BATCH)[:, None] & (c < C)[None, :]
        n = (j * BATCH + part % BATCH)[:, None]
        place = partial_sums + ((part // BATCH)[:, None] * visits * BATCH + n) * 2 * C + c[None, :]
        first += tl.load(place, mask=there, other=0.0)
        deviation = tl.load(scale + n * C + c[None, :], mask=there, other=0.0)
        second += tl.load(place + C, mask=there, other=0.0) * deviation
    tl.store(grad_weight + j * GRAD_WEIGHT + c, tl.sum(second, 0), mask=c < C)
    tl.store(grad_bias + j * GRAD_BIAS + c, tl.sum(first, 0), mask=c < C)


class GroupNorm(NamedTuple):
    """Statistics over the pixels of an example and the channels of a group."""

    groups: int
    eps: float

    def sets(self, visits: int, examples: int) -> int:
        """Number of sets with statistics of their own."""
        return examples

    def statistics(
        self, partial_sums: Tensor, flat: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        """Mean, 1 / std, factor and shift, [4, N, C]."""
        examples, rows, channels = flat.shape
        grid, tile = self._launch(examples, channels)
        out = torch.empty(4, examples, channels, dtype=torch.float32, device=flat.device)
        _statistics[grid](
            partial_sums,
            flat,
            weight,
            bias,
            out,
            rows,
            channels,
            self.groups,
            len(partial_sums),
            examples // len(weight),
            weight.stride(0),
            bias.stride(0),
            self.eps,
            **tile,
        )
        return out

    def input_grad_terms(
        self,
        partial_sums: Tensor,
        rows: int,
        statistics: Tensor,
        grad_weight: Tensor,
        grad_bias: Tensor,
    ) -> Tensor:
        """Terms b and d of the input gradient, [2, N, C]; writes weight and bias gradients."""
        _, examples, channels = statistics.shape
        visits, block_c = len(grad_weight), min(_WEIGHT_BLOCK[1], triton.next_power_of_2(channels))
        _weight_grads[(triton.cdiv(channels, block_c) * visits,)](
            partial_sums,
            statistics[1],
            grad_weight,
            grad_bias,
            channels,
            len(partial_sums),
            examples // visits,
            grad_weight.stride(0),
            grad_bias.stride(0),
            BLOCK_B=_WEIGHT_BLOCK[0],
            BLOCK_C=block_c,
        )
        grid, tile = self._launch(examples, channels)
        out = torch.empty(2, examples, channels, dtype=torch.float32, device=statistics.device)
        _input_grad_terms[grid](
            partial_sums, statistics, out, rows, channels, self.groups, len(partial_sums), **tile
        )
        return out

    def _launch(self, examples: int, channels: int) -> tuple[tuple[int], dict[str, int]]:
        block_c = triton.next_power_of_2(channels // self.groups)
        block_g = max(1, min(_MAX_CHANNELS // block_c, triton.next_power_of_2(self.groups)))
        tile = {
            "BLOCK_G": block_g,
            "BLOCK_C": block_c,
            "num_warps": max(1, min(8, block_g * block_c // 128)),
        }
        return (triton.cdiv(self.groups, block_g) * examples,), tile


# channels of an example that a program takes at once, if they are of several groups
_MAX_CHANNELS = 1024
_WEIGHT_BLOCK = (32, 32)  # examples of a visit, and channels, that a program takes at once
