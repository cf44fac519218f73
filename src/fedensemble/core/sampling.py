"""Random sampling of a few clients out of very many, without sorting all of them."""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_BITS = (1 << 63) - 1
# Candidates beyond twice the wanted number. With these, a group has too few candidates about once
# in 10^8 draws.
_SPARE = 20


def sample_without_replacement(group: Tensor, drawn: Tensor, share: Tensor) -> Tensor:
    """Indices of the `share[q]` members of each group q with the lowest random bits.

    Sorted by group, then by random bits; ties keep their order. A smaller group is returned whole.

    Args:
        group: group of each member, [N].
        drawn: random bits of each member (63 bits, never negative), [N].
        share: number of members wanted of each group, [Q].

    >>> group, drawn = torch.tensor([0, 1, 0, 1]), torch.tensor([7, 5, 3, 9])
    >>> sample_without_replacement(group, drawn, torch.tensor([2, 1])).tolist()
    [2, 0, 1]
    """
    # Sorting a million members per round is slow. The bits are uniform, so the lowest ones of a
    # group are almost surely below a threshold that about 2 * wanted + 20 members fall below. Only
    # these candidates are sorted; if a group has too few of them, all members are.
    sizes = torch.bincount(group, minlength=len(share))
    wanted = torch.minimum(share, sizes)
    ratio = torch.where(wanted > 0, 2.0 * wanted + _SPARE, 0.0) / sizes.clamp(min=1)
    threshold = torch.where(
        ratio < 1, (ratio.clamp(max=1).double() * 2.0**62).long() * 2 - 1, _MAX_BITS
    )
    candidates = torch.nonzero(drawn <= threshold[group]).flatten()
    counts = torch.bincount(group[candidates], minlength=len(share))
    if bool((counts < wanted).any()):
        candidates, counts = torch.arange(len(group)), sizes
    order = candidates[torch.argsort(drawn[candidates], stable=True)]
    order = order[torch.argsort(group[order], stable=True)]
    rank_in_group = torch.arange(len(order)) - (torch.cumsum(counts, 0) - counts)[group[order]]
    return order[rank_in_group < wanted[group[order]]]
