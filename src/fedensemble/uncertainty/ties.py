"""Sums over examples in the order of a score, in which equal scores are exchangeable."""

from __future__ import annotations

import torch
from torch import Tensor

# Fractions in [0, 1] are added as integers, multiples of 2**-36: integer sums are exact in any
# order. With floating-point sums, atomic additions on a GPU would give other last digits in each
# run. The rounding error is 1e-11 per value, and 2**27 values fit into an int64.
FIXED_POINT = 2**36


def fixed_point(fractions: Tensor) -> Tensor:
    """Fractions in [0, 1] as integer multiples of 1 / FIXED_POINT."""
    return (fractions.double() * FIXED_POINT).round().long()


def cumulative(score: Tensor, values: Tensor) -> Tensor:
    """Sums of the integers `values` over the i examples of lowest score, [n + 1] float64.

    Within examples of equal score, the sum is its mean over all orders of these examples: it grows
    linearly. Otherwise results would depend on the order of the rows.

    >>> cumulative(torch.tensor([0.5, 0.1, 0.5]), torch.tensor([1, 0, 0])).tolist()
    [0.0, 0.0, 0.5, 1.0]
    """
    order = score.argsort()
    _, group, size = torch.unique_consecutive(score[order], return_inverse=True, return_counts=True)
    end = size.cumsum(0)
    at_end = values[order].long().cumsum(0)[end - 1]
    at_start = torch.cat([at_end.new_zeros(1), at_end[:-1]])
    rank = torch.arange(1, len(score) + 1, device=score.device)
    part = (rank - (end - size)[group]).double() / size[group]
    sums = at_start[group] + part * (at_end - at_start)[group]
    return torch.cat([sums.new_zeros(1), sums])
