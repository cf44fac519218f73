"""Drawing a few out of very many without sorting them all."""

from __future__ import annotations

import torch
from torch import Tensor

_MOST = (1 << 63) - 1
# expected beside twice what is needed; then a group comes out short once in some 10^8 draws
_SPARE = 20


def sample_without_replacement(group: Tensor, drawn: Tensor, share: Tensor) -> Tensor:
    """The `share[q]` members of each group q with the lowest numbers: group after group, ascending,
    [sum of shares].

    Where a group has fewer, all of it. Ties go to who comes first.

    Args:
        group: of each, [N].
        drawn: random bits of each (63, never negative), [N].
        share: wanted of each group, [Q].

    >>> sample_without_replacement(torch.tensor([0, 1, 0, 1]), torch.tensor([7, 5, 3, 9]), torch.tensor([2, 1])).tolist()
    [2, 0, 1]
    """
    sizes = torch.bincount(group, minlength=len(share))
    wanted = torch.minimum(share, sizes)
    part = torch.where(wanted > 0, 2.0 * wanted + _SPARE, 0.0) / sizes.clamp(min=1)
    limit = torch.where(part < 1, (part.clamp(max=1).double() * 2.0**62).long() * 2 - 1, _MOST)
    few = torch.nonzero(drawn <= limit[group]).flatten()
    found = torch.bincount(group[few], minlength=len(share))
    if bool((found < wanted).any()):  # bad luck
        few, found = torch.arange(len(group)), sizes
    order = few[torch.argsort(drawn[few], stable=True)]
    order = order[torch.argsort(group[order], stable=True)]
    place = torch.arange(len(order)) - (torch.cumsum(found, 0) - found)[group[order]]
    return order[place < wanted[group[order]]]
