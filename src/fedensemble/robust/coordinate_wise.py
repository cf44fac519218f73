"""Aggregators that combine each coordinate separately: the median and the trimmed mean.

Reference: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal
statistical rates", ICML 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.aggregator import Aggregator, aggregators
from ..flat_params import Tree
from .options import check_share, tolerated

# Coordinates that are sorted at once. Sorting also allocates an index of 8 bytes per value.
_CHUNK = 1 << 20


@aggregators.register("median")
@dataclass(frozen=True, kw_only=True)
class Median(Aggregator):
    """The coordinate-wise median; for an even number of clients, the mean of the middle two.

    Tolerates any minority of a mode's clients. All clients count equally, independent of their
    weight.

    >>> changes = {"theta": torch.tensor([[0.0], [1.0], [99.0]])}
    >>> Median().combine(changes, torch.ones(3))["theta"].tolist()
    [1.0]
    """

    by_coordinate = True

    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        cut = (len(weight) - 1) // 2
        return {name: trimmed_mean(change, cut) for name, change in changes.items()}


@aggregators.register("trimmed-mean")
@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Aggregator):
    """The coordinate-wise mean without the smallest and the largest values.

    All clients count equally, independent of their weight. The number of values cut is rounded up,
    so that for a mode with few clients the result is the median.

    Args:
        trim: share of a mode's clients that is cut from each end, and so the largest share of
            malicious clients that is tolerated. Use more than the share of malicious clients in the
            population: by chance, a mode may have more of them in a round.
    """

    by_coordinate = True

    trim: float = 0.3

    def __post_init__(self) -> None:
        check_share(self, "trim")

    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        cut = tolerated(self.trim, len(weight))
        return {name: trimmed_mean(change, cut) for name, change in changes.items()}


def trimmed_mean(values: Tensor, cut: int) -> Tensor:
    """The mean of each column [n, P] without its `cut` smallest and `cut` largest values, [P]."""
    middle = slice(cut, len(values) - cut)
    means = [
        torch.sort(chunk, 0).values[middle].mean(0) for chunk in torch.split(values, _CHUNK, dim=1)
    ]
    return torch.cat(means) if means else values.new_empty(0)
