"""Limits on replies from a fleet's settings, and notes for the operator before the first round."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.schedule import Schedule
from ..core.visits.joint import join_plan
from ..engines.flower.reply_validation import Limits
from ..engines.flower.weight_limits import DOMINANT_SHARE
from ..errors import InputError
from ..flat_params import Tree
from ..modeling.losses import Loss, lower_bound
from .server_settings import Settings

_PLANNED_ROUNDS = 40  # rounds of the plan that `small_cohort_share` counts
_MAX_NAMED = 5  # clients that a note names at most


def build_limits(settings: Settings, loss: str | Loss) -> Limits:
    """Returns the limits that the settings describe; 0 in a setting means no limit."""
    if settings.min_cohort < 1:
        raise InputError(
            f"The run's setting `min-cohort` is at least 1; got {settings.min_cohort}."
        )
    return Limits(
        max_value=settings.max_value,
        max_examples=settings.max_examples,
        clip=settings.clip or None,
        clip_factor=settings.clip_factor or None,
        refuse_factor=settings.refuse_factor or None,
        max_loss=settings.max_loss,
        min_loss=lower_bound(loss),
        min_cohort=settings.min_cohort,
        max_weight=settings.max_weight or None,
        suspend_after=settings.suspend_after or None,
    )


def small_cohort_share(
    schedule: Schedule, schedule_state: Tree, min_cohort: int, *, joint: bool = False
) -> float:
    """Returns the share of planned visits to modes with fewer than `min_cohort` clients.

    Joint visits may train any mode, so that only the number of clients is known.
    """
    small = total = 0
    for round in range(_PLANNED_ROUNDS):
        plan = schedule.plan(schedule_state, round)
        plan = join_plan(plan) if joint else plan
        count = torch.bincount(plan.mode, minlength=schedule.modes)
        small, total = small + int(count[count < min_cohort].sum()), total + int(count.sum())
    return small / max(total, 1)


def cohort_notes(
    schedule: Schedule, schedule_state: Tree, min_cohort: int, *, joint: bool = False
) -> list[str]:
    """Returns a note if many cohorts will be too small; raises InputError if all will."""
    share = small_cohort_share(schedule, schedule_state, min_cohort, joint=joint)
    advice = (
        "Raise ensemble.clients_per_round, lower ensemble.modes, use the schedule 'balanced', or "
        "lower the run's setting `min-cohort`: with 1, the next client of a mode may receive one "
        "other client's update unchanged."
    )
    setup = f"{schedule.clients_per_round} clients per round and {schedule.modes} modes"
    if share == 1:
        raise InputError(
            f"With {setup} no mode ever has {min_cohort} clients, so none would be updated. "
            f"{advice}"
        )
    if share > 0.05:
        return [
            f"With {setup}, {share:.0%} of the visits go to modes with fewer than {min_cohort} "
            f"clients and have no effect. {advice}"
        ]
    return []


def weight_notes(names: list[str], sizes: Tensor, weights: Tensor) -> list[str]:
    """Returns notes on clients that claim many more examples than others.

    Args:
        names: names of the clients.
        sizes: number of examples that each client claims, [N].
        weights: weight of each client after the limit `max-weight`, [N].
    """
    notes = []
    capped = (weights < sizes).nonzero().flatten().tolist()
    if capped:
        named = [
            f"{names[i]} ({int(sizes[i])}, counts as {float(weights[i]):g})"
            for i in capped[:_MAX_NAMED]
        ]
        more = f" and {len(capped) - _MAX_NAMED} more" if len(capped) > _MAX_NAMED else ""
        notes.append(
            f"Clients that claim many more examples than the median: {', '.join(named)}{more}. "
            "If these claims are right, raise the run's setting `max-weight`, or set it to 0."
        )
    share, largest = float(weights.max() / weights.sum()), int(weights.argmax())
    if share > max(DOMINANT_SHARE, 1.5 / len(weights)):
        notes.append(
            f"{names[largest]} has {share:.0%} of the fleet's weight, by the examples it claims, "
            "and decides the result. With algorithm.weighting = 'uniform' all clients have the "
            "same weight."
        )
    return notes
