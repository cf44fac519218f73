"""Hours of the day: when clients are there, and who stands in for those who are not."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .. import prng
from ..core.sampling import sample_without_replacement
from ..core.types import Plan

HOUR = 3600.0
DAY = 24 * HOUR


@lru_cache(maxsize=2)  # the same in every round, and slow to draw for a million clients
def windows(population: int, least: float, most: float, seed: int) -> tuple[Tensor, Tensor]:
    """When each client's daily window opens, in seconds from midnight, and how long it lasts, [N]
    each.

    Args:
        least, most: hours; the length is uniform between them.
    """
    drawn = prng.uniform(prng.key(seed, "window", torch.arange(population)), 2)
    return drawn[:, 0] * DAY, (least + (most - least) * drawn[:, 1]) * HOUR


def seconds_left(opens: Tensor, length: Tensor, clock: float) -> Tensor:
    """How long each client is still there, [N]; 0 for those who are away."""
    left = (length - torch.remainder(clock - opens, DAY)).clamp(min=0)
    return torch.where(length >= DAY, torch.inf, left)


def stand_in(
    plan: Plan,
    stratum: Tensor | None,
    there: Tensor,
    seed: int,
    round: int,
    one_mode_a_client: bool,
) -> Plan:
    """The plan with clients who are away replaced by others of their stratum, who train the same
    mode.

    Where all of a stratum is away or asked already, the visit is left out.

    Args:
        stratum: of each client, [N]; None for one stratum.
        there: who can be asked, [N] bool.
        one_mode_a_client: whether somebody who trains another mode may not stand in.
    """
    if bool(there[plan.client].all()):
        return plan
    stratum = torch.zeros(len(there), dtype=torch.int64) if stratum is None else stratum
    client, filled = plan.client.clone(), there[plan.client]
    modes = sorted(set(plan.mode.tolist()))
    groups = (
        [torch.ones_like(filled)] if one_mode_a_client else [plan.mode == mode for mode in modes]
    )
    for number, group in enumerate(groups):
        free = there.clone()
        free[plan.client[group]] = False
        vacant = torch.nonzero(group & ~filled).flatten()
        vacant = vacant[torch.argsort(stratum[client[vacant]], stable=True)]
        needed = torch.bincount(stratum[client[vacant]], minlength=int(stratum.max()) + 1)
        drawn = prng.bits(prng.key(seed, "stand-in", round, number), len(there))
        candidates = torch.nonzero(free).flatten()
        chosen = candidates[
            sample_without_replacement(stratum[candidates], drawn[candidates], needed)
        ]
        found = torch.bincount(stratum[chosen], minlength=len(needed))
        rank = (
            torch.arange(len(vacant)) - (torch.cumsum(needed, 0) - needed)[stratum[client[vacant]]]
        )
        lucky = vacant[rank < found[stratum[client[vacant]]]]
        client[lucky], filled[lucky] = chosen, True
    order = torch.argsort(client[filled], stable=True)
    return Plan(client[filled][order], plan.mode[filled][order])
