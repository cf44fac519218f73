"""Whether clients of the same group choose the same mode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy
from torch import Tensor


def groups_in_names(names: Sequence[str] | None) -> list[str] | None:
    """The group of each client whose name is "group/client"; None if the names have no groups."""
    if not names or not all("/" in name for name in names):
        return None
    return [name.rpartition("/")[0] for name in names]


def recovered_share(choice: Tensor, groups: Sequence[str]) -> float:
    """The share of clients whose mode is that of their group.

    Each group gets at most one mode and each mode at most one group, so that the share is largest.

    Args:
        choice: mode of each client, [N]; -1 for none.
        groups: group of each client.

    >>> import torch
    >>> recovered_share(torch.tensor([1, 1, 0, 1]), ["a", "a", "b", "b"])
    0.75
    """
    numbers = np.unique(np.asarray(groups), return_inverse=True)[1]
    chosen = choice.numpy()
    counts = np.zeros((numbers.max() + 1, max(int(chosen.max()) + 1, 1)), dtype=np.int64)
    known = chosen >= 0
    np.add.at(counts, (numbers[known], chosen[known]), 1)
    return float(
        counts[scipy.optimize.linear_sum_assignment(counts, maximize=True)].sum() / len(chosen)
    )
