"""How many replies of each mode count in a round with over-selection, and whose."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import prng


def quotas(selected: Tensor, keep: int, seed: int, round: int) -> Tensor:
    """Divides `keep` slots among the modes, [K].

    Every mode with visits gets one slot; the others are in proportion to the selected visits.
    Rounding uses the largest remainders, with ties in a random order per round. If there are fewer
    slots than modes, the modes with the most visits get them.

    Args:
        selected: number of visits selected per mode, [K].
        keep: total number of slots.

    >>> quotas(torch.tensor([26, 52, 52, 0]), 100, seed=0, round=0).tolist()
    [20, 40, 40, 0]
    """
    if keep >= int(selected.sum()):
        return selected
    first = (selected > 0).long()  # one slot each
    if keep < int(first.sum()):
        first = torch.zeros_like(selected)
    others, num_left = selected - first, keep - int(first.sum())
    total = max(int(others.sum()), 1)
    share, remainder = others * num_left // total, others * num_left % total
    order = torch.argsort(prng.bits(prng.key(seed, "places", round), len(selected)))
    order = order[torch.argsort(remainder[order], descending=True, stable=True)]
    share[order[: num_left - int(share.sum())]] += 1
    return first + share


def first_to_finish(
    mode: Tensor, finish: Tensor, replies: Tensor, slots: Tensor, ties: Tensor | None = None
) -> Tensor:
    """True for visits that get a slot, bool [J]: the first to finish in each mode.

    A slot that a mode cannot fill goes to the next visit to finish in any mode.

    Args:
        mode: mode of each visit, [J].
        finish: when each visit finishes, [J].
        replies: whether the client of each visit replies at all, bool [J].
        slots: number of slots per mode, [K].
        ties: of visits that finish at the same time, the one with the lowest value is first, [J].
            None uses the order of the plan, which always prefers clients with low indices.
    """
    order = torch.arange(len(mode)) if ties is None else torch.argsort(ties, stable=True)
    order = order[torch.argsort(finish[order], stable=True)]
    order = order[replies[order]]
    by_mode = order[torch.argsort(mode[order], stable=True)]
    count = torch.bincount(mode[order], minlength=len(slots))
    rank = torch.arange(len(order)) - (torch.cumsum(count, 0) - count)[mode[by_mode]]
    has_slot = torch.zeros(len(mode), dtype=torch.bool)
    has_slot[by_mode[rank < slots[mode[by_mode]]]] = True
    waiting = order[~has_slot[order]]
    has_slot[waiting[: int(slots.sum()) - int(has_slot.sum())]] = True
    return has_slot
