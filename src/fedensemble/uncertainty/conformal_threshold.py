"""Thresholds of split-conformal prediction, exact and from histograms that clients send.

A bin contains its upper edge and not its lower one, so that the upper edge of a score's bin is
never below the score. A threshold from a histogram is therefore rounded up, and coverage is kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InputError

BINS = 1000  # of all groups together: 4,000 bytes as 32-bit integers


def conformal_rank(rows: int, alpha: float, clients: int = 1) -> int:
    """The rank of the score that is the threshold: ceil((1 - alpha) (rows + clients)).

    It is above `rows` if there are too few of them for any finite threshold.

    Args:
        rows: number of calibration rows, N.
        alpha: share of new rows whose target may be outside.
        clients: number of clients m that have them, if rows are exchangeable only within a client.
            A new row is then one of a client that is drawn in proportion to its rows plus one (Lu
            et al. 2023). The coverage is between 1 - alpha and 1 - alpha + m / (N + m); its upper
            end holds if no scores are equal.

    >>> conformal_rank(19, 0.1), conformal_rank(8, 0.1)
    (18, 9)
    """
    # The tolerance is for products such as 0.9 * 20, which can be above 18 in floating point.
    return max(math.ceil((1 - alpha) * (rows + clients) - 1e-9), 1)


def rows_needed(alpha: float, clients: int = 1) -> int:
    """The smallest number of rows with a finite threshold."""
    return max(math.ceil(clients * (1 - alpha) / alpha - 1e-9), 1)


def conformal_threshold(scores: Tensor, alpha: float, clients: int = 1) -> float:
    """The exact threshold for scores that are all in one place; infinite for too few of them.

    Args:
        scores: of calibration rows, [N].
        alpha, clients: as in `conformal_rank`.

    >>> conformal_threshold(torch.arange(1, 20), 0.1)
    18.0
    """
    if not 0 < alpha < 1:
        raise InputError(f"alpha must be above 0 and below 1; got {alpha!r}.")
    scores = scores.reshape(-1).double()
    rank = conformal_rank(len(scores), alpha, clients)
    return float(scores.kthvalue(rank).values) if rank <= len(scores) else math.inf


def bin_edges(lower: Tensor, upper: Tensor, bins: int) -> Tensor:
    """Upper edges of bins of equal width, one row per group, [G, bins] float64.

    Args:
        lower, upper: range of each group, [G].
        bins: number of bins.
    """
    part = torch.arange(1, bins + 1, dtype=torch.double) / bins
    edges = lower.double().unsqueeze(1) + (upper - lower).double().unsqueeze(1) * part
    edges[:, -1] = upper  # exactly: rounding must not leave out the largest score
    return edges


def count_scores(scores: Tensor, group: Tensor, edges: Tensor) -> Tensor:
    """Number of scores per group and bin, [G, bins] int64.

    The first bin has all scores up to its upper edge; scores above the last edge are left out.

    Args:
        scores: [n].
        group: of each score, [n].
        edges: of `bin_edges`, [G, bins].
    """
    groups, bins = edges.shape
    counts = torch.zeros(groups, bins + 1, dtype=torch.int64)
    for index in range(groups):
        own = scores[group == index].double()
        position = torch.searchsorted(edges[index], own)  # of the first edge that is not below
        counts[index] = torch.bincount(position, minlength=bins + 1)
    return counts[:, :bins]


def find_bins(counts: Tensor, rank: Tensor) -> Tensor:
    """The first bin up to which a group has at least `rank` scores, [G]; raises if none has.

    Args:
        counts: of all clients, [G, bins].
        rank: of each group, [G].
    """
    total = counts.cumsum(1)
    if bool((total[:, -1] < rank).any()):
        raise InputError("A histogram has fewer scores than the rank that is looked for.")
    return (total < rank.unsqueeze(1)).sum(1)
