"""Places per mode in a round with over-selection, and the visits that get them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import prng


def quotas(asked: Tensor, keep: int, seed: int, round: int) -> Tensor:
    """Divides `keep` places among the modes, [K].

    Every mode with visits gets one place; the others are in proportion to the visits asked for.
    Rounding uses the largest remainders, with ties in a random order per round. If there are fewer
    places than modes, the modes with the most visits get them.

    Args:
        asked: number of visits asked for per mode, [K].
        keep: total number of places.

    >>> quotas(torch.tensor([26, 52, 52, 0]), 100, seed=0, round=0).tolist()
    [20, 40, 40, 0]
    """
    if keep >= int(asked.sum()):
        return asked
    first = (asked > 0).long() if keep >= int((asked > 0).sum()) else torch.zeros_like(asked)
    others, left = asked - first, keep - int(first.sum())
    total = max(int(others.sum()), 1)
    share, remainder = others * left // total, others * left % total
    order = torch.argsort(prng.bits(prng.key(seed, "places", round), len(asked)))
    order = order[torch.argsort(remainder[order], descending=True, stable=True)]
    share[order[: left - int(share.sum())]] += 1
    return first + share


def first_to_finish(
    mode: Tensor, finish: Tensor, answers: Tensor, places: Tensor, ties: Tensor | None = None
) -> Tensor:
    """True for visits that get a place, bool [J]: the first to finish in each mode.

    A place that a mode cannot fill goes to the next visit to finish in any mode.

    Args:
        mode: mode of each visit, [J].
        finish: when each visit finishes, [J].
        answers: whether each visit replies at all, bool [J].
        places: number of places per mode, [K].
        ties: of visits that finish at the same time, the one with the lowest value is first, [J].
            None uses the order of the plan, which always prefers clients with low indices.
    """
    order = torch.arange(len(mode)) if ties is None else torch.argsort(ties, stable=True)
    order = order[torch.argsort(finish[order], stable=True)]
    order = order[answers[order]]
    by_mode = order[torch.argsort(mode[order], stable=True)]
    count = torch.bincount(mode[order], minlength=len(places))
    rank = torch.arange(len(order)) - (torch.cumsum(count, 0) - count)[mode[by_mode]]
    has_place = torch.zeros(len(mode), dtype=torch.bool)
    has_place[by_mode[rank < places[mode[by_mode]]]] = True
    waiting = order[~has_place[order]]
    has_place[waiting[: int(places.sum()) - int(has_place.sum())]] = True
    return has_place
