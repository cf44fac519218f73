"""Random strata, and drawing a round's clients from them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import draws
from ..core.sampling import lowest


def divide(population: int, strata: int, seed: int) -> Tensor:
    """The stratum of each client, [N]: a random division into Q groups whose sizes differ by one at most.

    >>> torch.bincount(divide(population=11, strata=3, seed=0)).tolist()
    [4, 4, 3]
    """
    order = draws.permutation(draws.key(seed, "strata"), population)
    stratum = torch.empty(population, dtype=torch.int64)
    stratum[order] = torch.arange(population) % strata
    return stratum


def shares(sizes: Tensor, total: int, seed: int, round: int) -> Tensor:
    """Clients to draw from each stratum, [Q], adding up to `total` <= N.

    Each stratum gives total // Q; where that leaves a remainder, strata drawn anew every round give one more.
    """
    strata = len(sizes)
    share = torch.full((strata,), total // strata, dtype=torch.int64)
    room = sizes > share  # with sizes within one of each other, there is always room for the remainder
    drawn = draws.bits(draws.key(seed, "remainder", round), strata).masked_fill(~room, (1 << 63) - 1)
    share[torch.argsort(drawn, stable=True)[: total % strata]] += 1
    return share


def sample(stratum: Tensor, total: int, seed: int, round: int) -> Tensor:
    """The clients of a round, [total], drawn without replacement from every stratum, in ascending order."""
    share = shares(torch.bincount(stratum), total, seed, round)
    drawn = draws.bits(draws.key(seed, "clients", round), len(stratum))
    return torch.sort(lowest(stratum, drawn, share)).values
