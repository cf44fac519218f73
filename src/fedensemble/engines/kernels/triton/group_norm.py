"""GroupNorm's numbers by example and channel, between the passes over its images: small launches.

Sums come by example and channel; statistics are over the channels of a group, slopes of weights
over a visit's batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .norm_reductions import whose


@triton.jit  # type: ignore[untyped-decorator]
def _channels(C, G, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program's example, the number of examples, its channels [groups, channels of a group],
    which are real.
    """
    n, examples, group, _ = whose(1, G, BLOCK_G, True)
    inside = tl.arange(0, BLOCK_C)[None, :]
    return n, examples, group[:, None] * (C // G) + inside, (group < G)[:, None] & (inside < C // G)


@triton.jit  # type: ignore[untyped-decorator]
def _total(sums, SPLIT, C, n, examples, c, real, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """The two sums of an example over all shares."""
    first = tl.zeros((BLOCK_G, BLOCK_C), dtype=tl.float32)
    second = tl.zeros((BLOCK_G, BLOCK_C), dtype=tl.float32)
    for split in range(SPLIT):
        place = sums + (split * examples + n) * 2 * C + c
        first += tl.load(place, mask=real, other=0.0)
        second += tl.load(place + C, mask=real, other=0.0)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def group_statistics(
    sums,
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
    """Out [4, N, C]: mean, 1 / deviation, the factor and shift of x.

    Channels are put together by their distances from the group's first number, for squares of
    numbers far from 0 would cancel. Rows of weight and bias lie WEIGHT and BIAS apart.
    """
    n, examples, c, real = _channels(C, G, BLOCK_G, BLOCK_C)
    first, second = _total(sums, SPLIT, C, n, examples, c, real, BLOCK_G, BLOCK_C)
    start = tl.load(x + n * ROWS * C + c, mask=real, other=0.0).to(tl.float32)
    lone = tl.arange(0, BLOCK_C)[None, :] == 0
    about = tl.sum(tl.where(lone, start, 0.0), 1)[:, None]
    near = first / ROWS
    far = start - about + near  # of a channel's mean
    middle = tl.sum(tl.where(real, far, 0.0), 1)[:, None] / (C // G)
    spread = tl.maximum(second / ROWS - near * near, 0.0) + (far - middle) * (far - middle)
    var = tl.sum(tl.where(real, spread, 0.0), 1)[:, None] / (C // G)
    centre = tl.broadcast_to(about + middle, (BLOCK_G, BLOCK_C))
    scale = tl.broadcast_to(1.0 / tl.sqrt(var + EPS), (BLOCK_G, BLOCK_C))
    j = n // BATCH
    factor = scale * tl.load(weight + j * WEIGHT + c, mask=real, other=0.0)
    place, each = out + n * C + c, examples.to(tl.int64) * C
    tl.store(place, centre, mask=real)
    tl.store(place + each, scale, mask=real)
    tl.store(place + 2 * each, factor, mask=real)
    tl.store(
        place + 3 * each,
        tl.load(bias + j * BIAS + c, mask=real, other=0.0) - centre * factor,
        mask=real,
    )


@triton.jit  # type: ignore[untyped-decorator]
def group_slopes(sums, known, out, ROWS, C, G, SPLIT, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """Out [2, N, C]: b and d of the images' slope, factor slope + b x + d."""
    n, examples, c, real = _channels(C, G, BLOCK_G, BLOCK_C)
    total, weighted = _total(sums, SPLIT, C, n, examples, c, real, BLOCK_G, BLOCK_C)
    each, count = examples.to(tl.int64) * C, ROWS * (C // G)
    mean = tl.load(known + n * C + c, mask=real, other=0.0)
    scale = tl.load(known + each + n * C + c, mask=real, other=0.0)
    factor = tl.load(known + 2 * each + n * C + c, mask=real, other=0.0)
    b = -scale * scale * (tl.sum(factor * weighted, 1)[:, None] / count)
    tl.store(out + n * C + c, b, mask=real)
    tl.store(
        out + each + n * C + c, -(tl.sum(factor * total, 1)[:, None] / count) - b * mean, mask=real
    )


@triton.jit  # type: ignore[untyped-decorator]
def weight_slopes(
    sums,
    scale,
    along_weight,
    along_bias,
    C,
    SPLIT,
    BATCH,
    ALONG_WEIGHT,
    ALONG_BIAS,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Slopes of weight and bias: sums over the shares of all examples of a visit, always in the
    same order.
    """
    j, visits, c, _ = whose(1, C, BLOCK_C, True)
    first = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float32)
    second = tl.zeros((BLOCK_B, BLOCK_C), dtype=tl.float32)
    for start in range(0, SPLIT * BATCH, BLOCK_B):
        share = start + tl.arange(0, BLOCK_B)
        there = (share < SPLIT * BATCH)[:, None] & (c < C)[None, :]
        n = (j * BATCH + share % BATCH)[:, None]
        place = sums + ((share // BATCH)[:, None] * visits * BATCH + n) * 2 * C + c[None, :]
        first += tl.load(place, mask=there, other=0.0)
        deviation = tl.load(scale + n * C + c[None, :], mask=there, other=0.0)
        second += tl.load(place + C, mask=there, other=0.0) * deviation
    tl.store(along_weight + j * ALONG_WEIGHT + c, tl.sum(second, 0), mask=c < C)
    tl.store(along_bias + j * ALONG_BIAS + c, tl.sum(first, 0), mask=c < C)


class GroupNorm(NamedTuple):
    """Statistics over an example's pixels and the channels of a group."""

    groups: int
    eps: float

    def sets(self, visits: int, examples: int) -> int:
        """Into how many sets with statistics of their own the examples fall."""
        return examples

    def known(self, found: Tensor, flat: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Mean, 1 / deviation, factor and shift, [4, N, C], from sums."""
        examples, rows, channels = flat.shape
        grid, tile = self._launch(examples, channels)
        out = torch.empty(4, examples, channels, dtype=torch.float32, device=flat.device)
        group_statistics[grid](
            found,
            flat,
            weight,
            bias,
            out,
            rows,
            channels,
            self.groups,
            len(found),
            examples // len(weight),
            weight.stride(0),
            bias.stride(0),
            self.eps,
            **tile,
        )
        return out

    def slopes(
        self, found: Tensor, rows: int, known: Tensor, along_weight: Tensor, along_bias: Tensor
    ) -> Tensor:
        """What `apply` needs for the images' slope, [2, N, C], from sums; writes the slopes of
        weight and bias.
        """
        _, examples, channels = known.shape
        visits, block_c = len(along_weight), min(_VISIT[1], triton.next_power_of_2(channels))
        weight_slopes[(triton.cdiv(channels, block_c) * visits,)](
            found,
            known[1],
            along_weight,
            along_bias,
            channels,
            len(found),
            examples // visits,
            along_weight.stride(0),
            along_bias.stride(0),
            BLOCK_B=_VISIT[0],
            BLOCK_C=block_c,
        )
        grid, tile = self._launch(examples, channels)
        out = torch.empty(2, examples, channels, dtype=torch.float32, device=known.device)
        group_slopes[grid](found, known, out, rows, channels, self.groups, len(found), **tile)
        return out

    def _launch(self, examples: int, channels: int) -> tuple[tuple[int], dict[str, int]]:
        block_c = triton.next_power_of_2(channels // self.groups)
        block_g = max(1, min(_EXAMPLE // block_c, triton.next_power_of_2(self.groups)))
        tile = {
            "BLOCK_G": block_g,
            "BLOCK_C": block_c,
            "num_warps": max(1, min(8, block_g * block_c // 128)),
        }
        return (triton.cdiv(self.groups, block_g) * examples,), tile


# channels of an example that a program takes at once, if they are of several groups
_EXAMPLE = 1024
_VISIT = (32, 32)  # examples of a visit, and channels, that a program takes at once
