"""Partial work: visits with fewer or more local steps than the others, as a plan asks for them."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import prng
from ...errors import InputError
from ..types import Plan
from .batches import MAX_STEPS
from .visit_keys import visit_key


def stop_early(plan: Plan, steps: Tensor, probability: float, seed: int, round: int) -> Plan:
    """The plan in which each visit stops early with a probability, after 1 to all of its steps.

    Args:
        steps: local steps of each visit, [J].
    """
    key = visit_key("algorithm", seed, round, plan.client, plan.mode)
    # The first two random values of the algorithm's key, which FedProx drew on the client in
    # earlier versions: runs with stragglers keep their stragglers.
    stops, fraction = (
        torch.as_tensor(prng.uniform(prng.fold_in(key, draw), 1))[:, 0] for draw in (1, 2)
    )
    limited = torch.ceil(fraction * steps).long().clamp(min=1)
    return plan._replace(steps=torch.where(stops < probability, limited, steps))


def check_steps(plan: Plan) -> None:
    """Raises unless the local steps that a plan asks for are positive integers, one per visit."""
    steps = plan.steps
    if steps is None:
        return
    if steps.dtype != torch.int64 or steps.shape != plan.client.shape:
        raise InputError(
            "A plan needs one int64 number of local steps per visit, or None for steps; got "
            f"{list(steps.shape)} {steps.dtype} for {len(plan.client)} visits."
        )
    if len(steps) and not 1 <= int(steps.min()) <= int(steps.max()) <= MAX_STEPS:
        raise InputError(
            f"A plan needs 1 to {MAX_STEPS:,} local steps per visit; got {int(steps.min())} to "
            f"{int(steps.max())}."
        )
