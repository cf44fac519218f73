"""Random strata, and a round's clients drawn from them so that every client is asked equally
often.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import prng
from ..core.sampling import sample_without_replacement
from ..core.types import Plan


def divide(population: int, strata: int, seed: int) -> Tensor:
    """The stratum of each client, [N]: a random division into Q groups whose sizes differ by one at
    most.

    >>> torch.bincount(divide(population=11, strata=3, seed=0)).tolist()
    [4, 4, 3]
    """
    order = prng.permutation(prng.key(seed, "strata"), population)
    stratum = torch.empty(population, dtype=torch.int64)
    stratum[order] = torch.arange(population) % strata
    return stratum


def apportion(sizes: Tensor, total: int, start: int) -> Tensor:
    """`total` places shared out in proportion to whole-number `sizes`, rounded up or down, [...]
    like `sizes`.

    Systematic sampling: the sizes lie end to end on a line, and marks at equal distances are
    counted in each. If `start` is uniform on 0 .. sum(sizes) - 1, the expected share of group g is
    exactly total * sizes[g] / sum(sizes); the shares always add up to `total`, and none exceeds its
    size as long as total <= sum(sizes).

    >>> [apportion(torch.tensor([2, 1]), 2, start).tolist() for start in range(3)]
    [[1, 1], [1, 1], [2, 0]]
    """
    marks = (total * torch.cumsum(sizes, 0) + start) // int(sizes.sum())
    return torch.diff(marks, prepend=marks.new_zeros(1))


def draw_plan(stratum: Tensor, mode: Tensor, modes: int, total: int, seed: int, round: int) -> Plan:
    """`total` of N clients, each with probability total / N, and the mode that each of them trains.

    A stratum gives its share of the clients, in proportion to its size, and they train the
    stratum's mode. A mode has places in proportion to its strata, each of which counts alike.
    Clients beyond their mode's places fill the places of other modes; there are none where Q
    divides N.

    Args:
        stratum: of each client, [N].
        mode: of each stratum in this round, [Q].
        modes: K.
    """
    strata, population = len(mode), len(stratum)
    sizes = torch.bincount(stratum, minlength=strata)
    # Strata of one mode lie side by side on the line, so that the rounding errors of a mode's
    # strata do not add up.
    # The order of modes, and of strata within a mode, is random: no two strata are kept apart in
    # every round.
    by_mode = prng.permutation(prng.key(seed, "order of modes", round), modes)
    rank = torch.argsort(by_mode)
    order = prng.permutation(prng.key(seed, "remainder", round), strata)
    order = order[torch.argsort(rank[mode[order]], stable=True)]
    start = int(prng.bits(prng.key(seed, "start", round), 1)) % population
    share = torch.empty_like(sizes)
    share[order] = apportion(sizes[order], total, start)
    drawn = prng.bits(prng.key(seed, "clients", round), population)
    client = torch.sort(sample_without_replacement(stratum, drawn, share)).values

    # The server averages within a mode, so a client counts for 1 / (clients of its mode). Were
    # modes' places in
    # proportion to their strata's sizes, clients of large strata would be asked as often as others
    # and count for less.
    # With the start scaled to Q, both lines are cut at the same points where all strata have one
    # size.
    places = torch.empty(modes, dtype=torch.int64)
    places[by_mode] = apportion(
        torch.bincount(mode, minlength=modes)[by_mode], total, start * strata // population
    )
    return Plan(client, fill_places(mode[stratum[client]], places, prng.key(seed, "moved", round)))


def fill_places(mode: Tensor, places: Tensor, key: prng.Key) -> Tensor:
    """The mode of each visit, [J], after as few random changes as give mode k exactly `places[k]`
    of the J visits.

    >>> fill_places(torch.tensor([0, 0, 0, 1]), torch.tensor([2, 1, 1]), draws.key(0, "doc")).bincount().tolist()
    [2, 1, 1]
    """
    if torch.equal(torch.bincount(mode, minlength=len(places)), places):
        return mode
    drawn = prng.bits(key, len(mode))
    stay = torch.zeros(len(mode), dtype=torch.bool)
    stay[sample_without_replacement(mode, drawn, places)] = True
    free = places - torch.bincount(mode[stay], minlength=len(places))
    moved = torch.nonzero(~stay).flatten()
    mode = mode.clone()
    # In random order: sorted by their old mode, low modes would always pass clients to low modes.
    mode[moved[torch.argsort(drawn[moved])]] = torch.repeat_interleave(
        torch.arange(len(places)), free
    )
    return mode
