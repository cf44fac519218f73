"""Weights of clients: the number of examples that they claim, up to a limit."""

from __future__ import annotations

import torch
from torch import Tensor

DOMINANT_SHARE = 0.5  # above this share of a mean, one client decides it


def cap_weights(sizes: Tensor, max_weight: float | None) -> Tensor:
    """Returns client weights, [N] float64: examples, at most `max_weight` times the median.

    The number of examples is a client's claim, which the server cannot verify. The limit is the
    same for the whole training and all means, so that algorithms which keep sums over all clients
    (SCAFFOLD, DIANA) stay consistent.

    >>> cap_weights(torch.tensor([10, 20, 9000]), 3.0).tolist()
    [10.0, 20.0, 60.0]
    """
    weights = sizes.double()
    if max_weight is None or not len(weights):
        return weights
    return weights.clamp(max=max_weight * float(weights.median()))


def find_dominant(mode: Tensor, weight: Tensor) -> dict[int, float]:
    """Returns the visits with most of the weight of their mode: index and share.

    Of two clients, one nearly always has more than half, so there the threshold is three quarters.

    >>> find_dominant(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([8.0, 1.0, 1.0, 3.0, 2.0]))
    {0: 0.8}
    """
    dominant = {}
    for current in torch.unique(mode).tolist():
        visits = (mode == current).nonzero().flatten()
        share = weight[visits] / weight[visits].sum()
        if float(share.max()) > max(DOMINANT_SHARE, 1.5 / len(visits)):
            dominant[int(visits[share.argmax()])] = round(float(share.max()), 4)
    return dominant
