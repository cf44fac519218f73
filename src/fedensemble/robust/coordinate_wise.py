"""Aggregators that combine every coordinate by itself: the median and the trimmed mean.

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

# coordinates that are sorted at a time: sorting holds an index of 8 bytes for each number
_PIECE = 1 << 20


@aggregators.register("median")
@dataclass(frozen=True, kw_only=True)
class Median(Aggregator):
    """The coordinate-wise median; for an even number of clients, the mean of the two in the middle.

    Tolerates any minority of a mode's clients. Clients count alike, whatever their weight.

    >>> Median().combine({"theta": torch.tensor([[0.0], [1.0], [99.0]])}, torch.ones(3))["theta"].tolist()
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

    Clients count alike, whatever their weight. The number that is cut is rounded up: in a small
    mode it is the median.

    Args:
        trim: share of a mode's clients cut from each end, the most malicious ones that it
            tolerates. Take more than the share of all clients: by chance a mode may have more of
            them in a round.
    """

    by_coordinate = True

    trim: float = 0.3

    def __post_init__(self) -> None:
        check_share(self, "trim")

    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        cut = tolerated(self.trim, len(weight))
        return {name: trimmed_mean(change, cut) for name, change in changes.items()}


def trimmed_mean(values: Tensor, cut: int) -> Tensor:
    """The mean of every column of [n, P] without its `cut` smallest and `cut` largest values,
    [P].
    """
    kept = slice(cut, len(values) - cut)
    pieces = [
        torch.sort(piece, 0).values[kept].mean(0) for piece in torch.split(values, _PIECE, dim=1)
    ]
    return torch.cat(pieces) if pieces else values.new_empty(0)
