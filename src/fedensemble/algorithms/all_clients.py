"""The mean of a vector over all clients, of which only some report in a round.

Client i keeps a vector z_i and uploads its change. Let p_i be the clients' weights, which add up to
1, and `seen` the total weight of those that have reported at least once. Those who report in a
round, S, have the share sum_S p_i, and x, the weighted mean of z_i over all clients that were ever
seen, becomes

    seen <- seen + share mean_S [first visit];   x <- x + share / seen mean_S change.

A client that reports for the first time starts at z_i = x: its change is then z_i - x, and the same
formula takes it into the mean. A client of a fleet that lost its memory reports as new once more,
and its former z_i stays in the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.types import Cohort
from ..flat_params import Tree


def first_visit(memory: Tree) -> Tensor:
    """1 where a client has not reported yet, else 0, [..., 1]."""
    return 1 - memory["visited"]


def unvisited(theta: Tensor) -> Tensor:
    """The flag in the memory of a client that has not reported yet, [..., 1]."""
    return torch.zeros_like(theta[..., :1])


def mean_of_all(mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
    """The next "theta", x above, and "seen", from the mean "change" and the mean of "first"."""
    # A client of a fleet could claim anything: the flag counts from 0 to 1, and nobody is seen more
    # than wholly.
    first = uploads["first"].clamp(0, 1)
    seen = (mode["seen"] + cohort.share * first).clamp(max=1)
    # A mode that nobody trained has share 0 and keeps its state whatever is computed here; it must
    # not divide by 0.
    scale = cohort.share / torch.where(seen > 0, seen, torch.ones_like(seen))
    return {"theta": mode["theta"] + scale * uploads["change"], "seen": seen}
