"""Availability of clients during the day, and substitutes for clients that are away."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .. import prng
from ..core.sampling import sample_without_replacement
from ..core.types import Plan

HOUR = 3600.0
DAY = 24 * HOUR


@lru_cache(maxsize=2)  # the same in every round, and slow to compute for a million clients
def windows(
    population: int, min_hours: float, max_hours: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Start (seconds after midnight) and length (seconds) of each client's daily window, [N] each.

    Args:
        min_hours, max_hours: bounds of the length in hours; it is uniform between them.
    """
    uniform = prng.uniform(prng.key(seed, "window", torch.arange(population)), 2)
    return uniform[:, 0] * DAY, (min_hours + (max_hours - min_hours) * uniform[:, 1]) * HOUR


def seconds_left(opens: Tensor, length: Tensor, clock: float) -> Tensor:
    """Seconds until each client's window closes, [N]; 0 for clients that are away."""
    left = (length - torch.remainder(clock - opens, DAY)).clamp(min=0)
    return torch.where(length >= DAY, torch.inf, left)


def replace_unavailable_clients(
    plan: Plan,
    stratum: Tensor | None,
    is_available: Tensor,
    seed: int,
    round: int,
    one_mode_per_client: bool,
) -> Plan:
    """The plan with clients that are away replaced by other clients of their stratum.

    A substitute trains the same mode. If all clients of a stratum are away or already in the plan,
    the visit is dropped.

    Args:
        stratum: stratum of each client, [N]; None for one stratum.
        is_available: True for clients that are available, bool [N].
        one_mode_per_client: whether a client that already trains another mode cannot be a
            substitute.
    """
    if bool(is_available[plan.client].all()):
        return plan
    stratum = torch.zeros(len(is_available), dtype=torch.int64) if stratum is None else stratum
    # Substitutes take over what the visit asks for, its mode and local steps.
    client, filled = plan.client.clone(), is_available[plan.client]
    modes = sorted(set(plan.mode.tolist()))
    groups = (
        [torch.ones_like(filled)] if one_mode_per_client else [plan.mode == mode for mode in modes]
    )
    for number, group in enumerate(groups):
        can_substitute = is_available.clone()
        can_substitute[plan.client[group]] = False
        vacant = torch.nonzero(group & ~filled).flatten()
        vacant = vacant[torch.argsort(stratum[client[vacant]], stable=True)]
        needed = torch.bincount(stratum[client[vacant]], minlength=int(stratum.max()) + 1)
        bits = prng.bits(prng.key(seed, "stand-in", round, number), len(is_available))
        candidates = torch.nonzero(can_substitute).flatten()
        substitutes = candidates[
            sample_without_replacement(stratum[candidates], bits[candidates], needed)
        ]
        # Vacant visits and substitutes are both sorted by stratum. If a stratum has fewer
        # substitutes than vacant visits, its first visits get them.
        num_substitutes = torch.bincount(stratum[substitutes], minlength=len(needed))
        rank_in_stratum = (
            torch.arange(len(vacant)) - (torch.cumsum(needed, 0) - needed)[stratum[client[vacant]]]
        )
        replaced = vacant[rank_in_stratum < num_substitutes[stratum[client[vacant]]]]
        client[replaced], filled[replaced] = substitutes, True
    order = torch.argsort(client[filled], stable=True)
    return plan._replace(client=client).select(filled).select(order)
