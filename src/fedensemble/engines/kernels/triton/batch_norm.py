"""Per-client, per-channel BatchNorm statistics and their gradients.

They are computed between the two passes over the activations; one kernel launch in forward, one in
backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .norm_reductions import locate


@triton.jit  # type: ignore[untyped-decorator]
def _sum_splits(partial_sums, SPLIT, C, j, sets, c, real, SPLITS: tl.constexpr):
    """The two sums of a visit over all splits, of which there are at most SPLITS."""
    split = tl.arange(0, SPLITS)[:, None]
    place = partial_sums + (split * sets + j) * 2 * C + c[None, :]
    there = (split < SPLIT) & real[None, :]
    first, second = tl.load(place, mask=there, other=0.0), tl.load(place + C, mask=there, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(
    partial_sums,
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
    SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Out [6, J, C]: mean, 1 / std, factor and shift of x, and the new running mean and variance.

    Rows of running mean, running variance, weight and bias are MEAN, VARIANCE, WEIGHT and BIAS
    elements apart.
    """
    j, visits, c, _ = locate(1, C, BLOCK_C, True)
    real = c < C
    first, second = _sum_splits(partial_sums, SPLIT, C, j, visits, c, real, SPLITS)
    near = first / ROWS
    center = tl.load(x + j * ROWS * C + c, mask=real, other=0.0).to(tl.float32) + near
    var = tl.maximum(second / ROWS - near * near, 0.0)
    scale = 1.0 / tl.sqrt(var + EPS)
    factor = scale * tl.load(weight + j * WEIGHT + c, mask=real, other=0.0)
    place, each = out + j * C + c, visits.to(tl.int64) * C
    tl.store(place, center, mask=real)
    tl.store(place + each, scale, mask=real)
    tl.store(place + 2 * each, factor, mask=real)
    tl.store(
        place + 3 * each,
        tl.load(bias + j * BIAS + c, mask=real, other=0.0) - center * factor,
        mask=real,
    )
    old = tl.load(mean + j * MEAN + c, mask=real, other=0.0)
    spread = tl.load(variance + j * VARIANCE + c, mask=real, other=0.0)
    tl.store(place + 4 * each, (1 - MOMENTUM) * old + MOMENTUM * center, mask=real)
    tl.store(
        place + 5 * each, (1 - MOMENTUM) * spread + MOMENTUM * (var * ROWS / (ROWS - 1)), mask=real
    )


@triton.jit  # type: ignore[untyped-decorator]
def input_grad_terms(
    partial_sums,
    statistics,
    out,
    grad_weight,
    grad_bias,
    ROWS,
    C,
    SPLIT,
    GRAD_WEIGHT,
    GRAD_BIAS,
    SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Gradients of weight and bias, and out [2, J, C]: b and d of the input gradient.

    The input gradient is factor grad_output + b x + d.
    """
    j, visits, c, _ = locate(1, C, BLOCK_C, True)
    real = c < C
    total, weighted = _sum_splits(partial_sums, SPLIT, C, j, visits, c, real, SPLITS)
    place, each = out + j * C + c, visits.to(tl.int64) * C
    mean = tl.load(statistics + j * C + c, mask=real, other=0.0)
    scale = tl.load(statistics + each + j * C + c, mask=real, other=0.0)
    factor = tl.load(statistics + 2 * each + j * C + c, mask=real, other=0.0)
    b = -factor * scale * scale * weighted / ROWS
    tl.store(grad_weight + j * GRAD_WEIGHT + c, weighted * scale, mask=real)
    tl.store(grad_bias + j * GRAD_BIAS + c, total, mask=real)
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
        """Number of sets with statistics of their own."""
        return visits

    def statistics(
        self, partial_sums: Tensor, flat: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        """Mean, 1 / std, factor, shift, and the new running mean and variance, [6, J, C]."""
        visits, rows, channels = flat.shape
        grid, tile = _launch(partial_sums)
        out = torch.empty(6, visits, channels, dtype=torch.float32, device=flat.device)
        _statistics[grid](
            partial_sums,
            flat,
            self.mean,
            self.variance,
            weight,
            bias,
            out,
            rows,
            channels,
            len(partial_sums),
            self.mean.stride(0),
            self.variance.stride(0),
            weight.stride(0),
            bias.stride(0),
            self.eps,
            self.momentum,
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
        """Terms b and d of the input gradient, [2, J, C]; writes weight and bias gradients."""
        _, visits, channels = statistics.shape
        grid, tile = _launch(partial_sums)
        out = torch.empty(2, visits, channels, dtype=torch.float32, device=statistics.device)
        input_grad_terms[grid](
            partial_sums,
            statistics,
            out,
            grad_weight,
            grad_bias,
            rows,
            channels,
            len(partial_sums),
            grad_weight.stride(0),
            grad_bias.stride(0),
            **tile,
        )
        return out


_MAX_CHANNELS = 32  # of a program at most


def _launch(partial_sums: Tensor) -> tuple[tuple[int], dict[str, int]]:
    split, visits, _, channels = partial_sums.shape
    block_c = max(8, min(_MAX_CHANNELS, triton.next_power_of_2(channels)))
    tile = {"SPLITS": triton.next_power_of_2(split), "BLOCK_C": block_c}
    return (triton.cdiv(channels, block_c) * visits,), tile
