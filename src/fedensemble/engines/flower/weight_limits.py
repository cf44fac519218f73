"""How much each client counts: the examples it claims, up to a limit."""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 0.5  # share of a mean above which one client decides it


def limited(sizes: Tensor, most: float | None) -> Tensor:
    """Weights of the clients, [N] float64: their examples, but no more than `most` times the
    median.

    Examples are what a client says it has; nobody can count them. The limit is one for the whole
    training and not one for each mean, so that methods which keep sums over all clients (SCAFFOLD,
    DIANA) stay consistent.

    >>> limited(torch.tensor([10, 20, 9000]), 3.0).tolist()
    [10.0, 20.0, 60.0]
    """
    weights = sizes.double()
    return (
        weights
        if most is None or not len(weights)
        else weights.clamp(max=most * float(weights.median()))
    )


def dominant(mode: Tensor, weight: Tensor) -> dict[int, float]:
    """Visits that hold most of the weight of their mode, by index, with their share.

    Of two clients one nearly always has more than half, so there it takes three quarters.

    >>> dominant(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([8.0, 1.0, 1.0, 3.0, 2.0]))
    {0: 0.8}
    """
    found = {}
    for each in torch.unique(mode).tolist():
        own = (mode == each).nonzero().flatten()
        share = weight[own] / weight[own].sum()
        if float(share.max()) > max(MOST, 1.5 / len(own)):
            found[int(own[share.argmax()])] = round(float(share.max()), 4)
    return found
