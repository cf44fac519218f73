"""Random sampling of a few clients out of very many, without sorting all of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MAX_BITS = (1 << 63) - 1
# Candidates beyond twice the wanted number. With these, a group has too few candidates about once
# in 10^8 draws.
_SPARE = 20
_MANY = 1000  # members from which it pays to look for candidates


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
    # In NumPy: a round samples a few dozen clients, and calls of torch take longer than the work.
    groups, bits, wanted = (tensor.numpy(force=True) for tensor in (group, drawn, share))
    sizes = np.bincount(groups, minlength=len(share))
    wanted = np.minimum(wanted, sizes)
    members, counts = np.arange(len(groups)), sizes
    if len(groups) > _MANY:
        # Sorting a million members per round is slow. The bits are uniform, so the lowest ones of a
        # group are almost surely below a threshold that about 2 * wanted + 20 members fall below.
        # Only these candidates are sorted; if a group has too few of them, all members are.
        ratio = np.where(wanted > 0, 2.0 * wanted + _SPARE, 0.0) / np.maximum(sizes, 1)
        low = (np.minimum(ratio, 1) * 2.0**62).astype(np.int64)
        threshold = np.where(ratio < 1, low * 2 - 1, _MAX_BITS)
        candidates = np.flatnonzero(bits <= threshold[groups])
        found = np.bincount(groups[candidates], minlength=len(share))
        if (found >= wanted).all():
            members, counts = candidates, found
    order = members[np.lexsort((bits[members], groups[members]))]
    rank_in_group = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy(order[rank_in_group < np.repeat(wanted, counts)])
