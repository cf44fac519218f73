"""Random strata, and client sampling from them in which all clients are equally likely."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import prng
from ..core.sampling import sample_without_replacement
from ..core.types import Plan


def divide(population: int, strata: int, seed: int) -> Tensor:
    """The stratum of each client, [N]: a random division into Q groups of equal size, within 1.

    >>> torch.bincount(divide(population=11, strata=3, seed=0)).tolist()
    [4, 4, 3]
    """
    order = prng.permutation(prng.key(seed, "strata"), population)
    stratum = torch.empty(population, dtype=torch.int64)
    stratum[order] = torch.arange(population) % strata
    return stratum


def apportion(sizes: Tensor, total: int, start: int) -> Tensor:
    """Divides `total` slots in proportion to integer `sizes` [G], rounded up or down, [G].

    Systematic sampling: the sizes lie end to end on a line, and marks at equal distances are
    counted in each. If `start` is uniform on 0 .. sum(sizes) - 1, the expected share of group g is
    exactly total * sizes[g] / sum(sizes). The shares always add up to `total`, and none exceeds its
    group's size as long as total <= sum(sizes).

    >>> [apportion(torch.tensor([2, 1]), 2, start).tolist() for start in range(3)]
    [[1, 1], [1, 1], [2, 0]]
    """
    ends = np.cumsum(sizes.numpy())
    marks = (total * ends + start) // ends[-1]
    return torch.from_numpy(np.diff(marks, prepend=0))


def draw_plan(stratum: Tensor, mode: Tensor, modes: int, total: int, seed: int, round: int) -> Plan:
    """Draws `total` of N clients, each with probability total / N, and the mode of each.

    A stratum provides clients in proportion to its size, and they train the stratum's mode. A mode
    has slots in proportion to the number of its strata. Clients in excess of their mode's slots
    fill the slots of other modes; if Q divides N, there are none.

    Args:
        stratum: stratum of each client, [N].
        mode: mode of each stratum in this round, [Q].
        modes: K.
        total: number of clients to draw.
    """
    strata, population = len(mode), len(stratum)
    # The arithmetic is done in NumPy, whose calls take a fraction of the time of torch's.
    stratum_of, mode_of = stratum.numpy(), mode.numpy()
    sizes = np.bincount(stratum_of, minlength=strata)
    # Strata of one mode lie next to each other on the line of `apportion`, so that the rounding
    # errors of a mode's strata do not add up. The order of modes, and of strata within a mode, is
    # random, so that every two strata can be rounded up together.
    mode_order = prng.permutation(prng.key(seed, "order of modes", round), modes).numpy()
    rank = np.argsort(mode_order)
    order = prng.permutation(prng.key(seed, "remainder", round), strata).numpy()
    order = order[np.argsort(rank[mode_of[order]], kind="stable")]
    start = int(prng.bits(prng.key(seed, "start", round), 1)) % population
    share = np.empty_like(sizes)
    share[order] = apportion(torch.from_numpy(sizes[order]), total, start).numpy()
    bits = prng.bits(prng.key(seed, "clients", round), population)
    drawn = sample_without_replacement(stratum, bits, torch.from_numpy(share))
    client = np.sort(drawn.numpy())

    # The server averages within a mode, so a client has the weight 1 / (clients of its mode). If
    # the slots of a mode were in proportion to the sizes of its strata, clients of large strata
    # would be drawn as often as others, but with a smaller weight. So each stratum counts equally.
    # `start` is scaled to Q: if all strata have the same size, both lines are then cut at the same
    # points, and no client changes its mode.
    slots = np.empty(modes, dtype=np.int64)
    strata_of_mode = np.bincount(mode_of, minlength=modes)[mode_order]
    slots[mode_order] = apportion(
        torch.from_numpy(strata_of_mode), total, start * strata // population
    ).numpy()
    planned = torch.from_numpy(mode_of[stratum_of[client]])
    key = prng.key(seed, "moved", round)
    return Plan(torch.from_numpy(client), fill_slots(planned, torch.from_numpy(slots), key))


def fill_slots(mode: Tensor, slots: Tensor, key: prng.Key) -> Tensor:
    """The mode of each visit, [J], with as few random changes as give mode k `slots[k]` visits.

    >>> mode, slots = torch.tensor([0, 0, 0, 1]), torch.tensor([2, 1, 1])
    >>> fill_slots(mode, slots, prng.key(0, "doc")).bincount().tolist()
    [2, 1, 1]
    """
    modes, wanted = mode.numpy(), slots.numpy()
    if np.array_equal(np.bincount(modes, minlength=len(wanted)), wanted):
        return mode
    bits = prng.bits(key, len(mode))
    stays = np.zeros(len(modes), dtype=bool)
    stays[sample_without_replacement(mode, bits, slots).numpy()] = True
    free_slots = wanted - np.bincount(modes[stays], minlength=len(wanted))
    moved = np.flatnonzero(~stays)
    filled = modes.copy()
    # In random order. In the order of their old modes, clients of low modes would always move to
    # low modes.
    filled[moved[np.argsort(bits.numpy()[moved])]] = np.repeat(np.arange(len(wanted)), free_slots)
    return torch.from_numpy(filled)
