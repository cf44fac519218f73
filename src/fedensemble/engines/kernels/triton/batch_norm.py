"""BatchNorm's numbers by visit and channel, between the passes over its images: one small launch
each way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .norm_reductions import whose


@triton.jit  # type: ignore[untyped-decorator]
def _total(sums, SPLIT, C, j, sets, c, real, SHARES: tl.constexpr):
    """The two sums of a visit over all shares, of which there may be SHARES."""
    split = tl.arange(0, SHARES)[:, None]
    place = sums + (split * sets + j) * 2 * C + c[None, :]
    there = (split < SPLIT) & real[None, :]
    first, second = tl.load(place, mask=there, other=0.0), tl.load(place + C, mask=there, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit  # type: ignore[untyped-decorator]
def statistics(
    sums,
    x,
    mean,
    variance,
    weight,
    bias,
    out,
    ROWS,
    C,
    SPLIT,
    MEAN,
    VARIANCE,
    WEIGHT,
    BIAS,
    EPS,
    MOMENTUM,
    SHARES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Out [6, J, C]: mean, 1 / deviation, the factor and shift of x, and the new running mean and
    variance.

    Rows of running mean and variance, weight and bias lie MEAN, VARIANCE, WEIGHT and BIAS apart.
    """
    j, visits, c, _ = whose(1, C, BLOCK_C, True)
    real = c < C
    first, second = _total(sums, SPLIT, C, j, visits, c, real, SHARES)
    near = first / ROWS
    centre = tl.load(x + j * ROWS * C + c, mask=real, other=0.0).to(tl.float32) + near
    var = tl.maximum(second / ROWS - near * near, 0.0)
    scale = 1.0 / tl.sqrt(var + EPS)
    factor = scale * tl.load(weight + j * WEIGHT + c, mask=real, other=0.0)
    place, each = out + j * C + c, visits.to(tl.int64) * C
    tl.store(place, centre, mask=real)
    tl.store(place + each, scale, mask=real)
    tl.store(place + 2 * each, factor, mask=real)
    tl.store(
        place + 3 * each,
        tl.load(bias + j * BIAS + c, mask=real, other=0.0) - centre * factor,
        mask=real,
    )
    old = tl.load(mean + j * MEAN + c, mask=real, other=0.0)
    spread = tl.load(variance + j * VARIANCE + c, mask=real, other=0.0)
    tl.store(place + 4 * each, (1 - MOMENTUM) * old + MOMENTUM * centre, mask=real)
    tl.store(
        place + 5 * each, (1 - MOMENTUM) * spread + MOMENTUM * (var * ROWS / (ROWS - 1)), mask=real
    )


@triton.jit  # type: ignore[untyped-decorator]
def slopes(
    sums,
    known,
    out,
    along_weight,
    along_bias,
    ROWS,
    C,
    SPLIT,
    ALONG_WEIGHT,
    ALONG_BIAS,
    SHARES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Slopes of weight and bias, and out [2, J, C]: b and d of the images' slope, factor slope + b
    x + d.
    """
    j, visits, c, _ = whose(1, C, BLOCK_C, True)
    real = c < C
    total, weighted = _total(sums, SPLIT, C, j, visits, c, real, SHARES)
    place, each = out + j * C + c, visits.to(tl.int64) * C
    mean = tl.load(known + j * C + c, mask=real, other=0.0)
    scale = tl.load(known + each + j * C + c, mask=real, other=0.0)
    factor = tl.load(known + 2 * each + j * C + c, mask=real, other=0.0)
    b = -factor * scale * scale * weighted / ROWS
    tl.store(along_weight + j * ALONG_WEIGHT + c, weighted * scale, mask=real)
    tl.store(along_bias + j * ALONG_BIAS + c, total, mask=real)
    tl.store(place, b, mask=real)
    tl.store(place + each, -factor * total / ROWS - b * mean, mask=real)


class BatchNorm(NamedTuple):
    """Statistics over a visit's batch and pixels.

    Args:
        mean, variance: running statistics, [J, C].
        momentum: of the running statistics.
    """

    mean: Tensor
    variance: Tensor
    eps: float
    momentum: float

    def sets(self, visits: int, examples: int) -> int:
        """Into how many sets with statistics of their own the examples fall."""
        return visits

    def known(self, found: Tensor, flat: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Mean, 1 / deviation, factor, shift, and the new running mean and variance, [6, J, C],
        from sums.
        """
        visits, rows, channels = flat.shape
        grid, tile = _launch(found)
        out = torch.empty(6, visits, channels, dtype=torch.float32, device=flat.device)
        statistics[grid](
            found,
            flat,
            self.mean,
            self.variance,
            weight,
            bias,
            out,
            rows,
            channels,
            len(found),
            self.mean.stride(0),
            self.variance.stride(0),
            weight.stride(0),
            bias.stride(0),
            self.eps,
            self.momentum,
            **tile,
        )
        return out

    def slopes(
        self, found: Tensor, rows: int, known: Tensor, along_weight: Tensor, along_bias: Tensor
    ) -> Tensor:
        """What `apply` needs for the images' slope, [2, J, C], from sums; writes the slopes of
        weight and bias.
        """
        _, visits, channels = known.shape
        grid, tile = _launch(found)
        out = torch.empty(2, visits, channels, dtype=torch.float32, device=known.device)
        slopes[grid](
            found,
            known,
            out,
            along_weight,
            along_bias,
            rows,
            channels,
            len(found),
            along_weight.stride(0),
            along_bias.stride(0),
            **tile,
        )
        return out


_CHANNELS = 32  # of a program at most


def _launch(found: Tensor) -> tuple[tuple[int], dict[str, int]]:
    split, visits, _, channels = found.shape
    block_c = max(8, min(_CHANNELS, triton.next_power_of_2(channels)))
    tile = {"SHARES": triton.next_power_of_2(split), "BLOCK_C": block_c}
    return (triton.cdiv(channels, block_c) * visits,), tile
