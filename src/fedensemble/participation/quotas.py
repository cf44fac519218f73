"""The places of a round: so many for each mode, taken by the first to finish."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import prng


def quotas(asked: Tensor, keep: int, seed: int, round: int) -> Tensor:
    """Places of each mode among `keep`, [K]: one for every mode asked for, the others in proportion
    to who was asked.

    Largest remainders round it, equal ones in an order drawn anew each round. With fewer places
    than modes, those with the most visits have them.

    Args:
        asked: visits asked for of each mode, [K].

    >>> quotas(torch.tensor([26, 52, 52, 0]), 100, seed=0, round=0).tolist()
    [20, 40, 40, 0]
    """
    if keep >= int(asked.sum()):
        return asked
    sure = (asked > 0).long() if keep >= int((asked > 0).sum()) else torch.zeros_like(asked)
    others, left = asked - sure, keep - int(sure.sum())
    total = max(int(others.sum()), 1)
    share, rest = others * left // total, others * left % total
    order = torch.argsort(prng.bits(prng.key(seed, "places", round), len(asked)))
    order = order[torch.argsort(rest[order], descending=True, stable=True)]
    share[order[: left - int(share.sum())]] += 1
    return sure + share


def first_to_finish(
    mode: Tensor, finish: Tensor, answers: Tensor, places: Tensor, ties: Tensor | None = None
) -> Tensor:
    """Which visits get a place, [J] bool: in each mode the first to finish of those who answer.

    A place that a mode cannot fill goes to the next to finish in any mode.

    Args:
        mode: of each visit, [J].
        finish: when each finishes, [J].
        answers: whether it answers at all, [J] bool.
        places: of each mode, [K].
        ties: of visits that finish at the same time the one with the lowest number is first, [J];
            None takes the plan's order, in which clients with low numbers always win.
    """
    order = torch.arange(len(mode)) if ties is None else torch.argsort(ties, stable=True)
    order = order[torch.argsort(finish[order], stable=True)]
    order = order[answers[order]]
    by_mode = order[torch.argsort(mode[order], stable=True)]
    count = torch.bincount(mode[order], minlength=len(places))
    rank = torch.arange(len(order)) - (torch.cumsum(count, 0) - count)[mode[by_mode]]
    kept = torch.zeros(len(mode), dtype=torch.bool)
    kept[by_mode[rank < places[mode[by_mode]]]] = True
    waiting = order[~kept[order]]
    kept[waiting[: int(places.sum()) - int(kept.sum())]] = True
    return kept
