"""The mean of a vector over all clients, although only some of them report in a round.

Client i keeps a vector z_i and uploads its change. Let p_i be the weights of the clients, which sum
to 1, let `seen` be the total weight of the clients that have reported at least once, and let S be
the clients that report in this round, with the weight share = sum_S p_i. The server keeps x, the
weighted mean of z_i over all clients seen so far, and updates it by

    seen <- seen + share mean_S [first visit];   x <- x + share / seen mean_S change.

A client that reports for the first time starts at z_i = x. Its change is then z_i - x, and the same
formula adds it to the mean. If a client of a real fleet loses its state, it reports as a new client
again, and its old z_i stays in the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.types import Cohort
from ..flat_params import Tree


def init_visited_flag(theta: Tensor) -> Tensor:
    """The value of "visited" in the state of a client that has not reported yet, [..., 1]."""
    return torch.zeros_like(theta[..., :1])


def first_visit_flag(memory: Tree) -> Tensor:
    """1 if the client has not reported before, else 0, [..., 1]."""
    return 1 - memory["visited"]


def update_mean_of_all(mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
    """The next "theta" (x above) and "seen", from the mean "change" and the mean "first"."""
    # A client of a real fleet can send any value. Clamping keeps "first" a fraction and "seen" at
    # most 1, so that a wrong flag cannot corrupt the weight of all later changes.
    first = uploads["first"].clamp(0, 1)
    seen = (mode["seen"] + cohort.share * first).clamp(max=1)
    # A mode that no client trained has share 0 and seen may be 0. Its result is discarded by the
    # caller, but 0 / 0 would put NaN into it, so divide by 1 instead.
    scale = cohort.share / torch.where(seen > 0, seen, torch.ones_like(seen))
    return {"theta": mode["theta"] + scale * uploads["change"], "seen": seen}
