"""A fleet's limits on answers, and what to tell the operator about them before the first round."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.schedule import Schedule
from ..engines.flower.reply_validation import Limits
from ..engines.flower.weight_limits import MOST
from ..errors import InputError
from ..flat_params import Tree
from ..modeling.losses import Loss, lower_bound
from .server_settings import Settings

_ROUNDS = 40  # of the plan that are looked at
_NAMED = 5  # clients that a warning names at most


def find_limits(settings: Settings, loss: str | Loss) -> Limits:
    """The limits that settings describe."""
    if settings.min_cohort < 1:
        raise InputError(
            f"The run's setting `min-cohort` is at least 1; got {settings.min_cohort}."
        )
    return Limits(
        value=settings.max_value,
        examples=settings.max_examples,
        clip=settings.clip or None,
        clip_factor=settings.clip_factor or None,
        refuse_factor=settings.refuse_factor or None,
        loss=settings.max_loss,
        least_loss=lower_bound(loss),
        min_cohort=settings.min_cohort,
        max_weight=settings.max_weight or None,
        suspend_after=settings.suspend_after or None,
    )


def small_cohorts(schedule: Schedule, planned: Tree, least: int) -> float:
    """The share of the visits planned for the first rounds that go to modes with fewer than `least`
    clients.
    """
    few = total = 0
    for round in range(_ROUNDS):
        count = torch.bincount(schedule.plan(planned, round).mode, minlength=schedule.modes)
        few, total = few + int(count[count < least].sum()), total + int(count.sum())
    return few / max(total, 1)


def cohort_remarks(schedule: Schedule, planned: Tree, least: int) -> list[str]:
    """A warning where many modes will have too few clients; raises if no mode would ever be
    updated.
    """
    share = small_cohorts(schedule, planned, least)
    change = (
        "Raise ensemble.clients_per_round, lower ensemble.modes, use the schedule 'balanced', or lower the run's "
        "setting `min-cohort`: with 1, the next client of a mode may receive one other client's update as it was."
    )
    asked = f"{schedule.clients_per_round} clients per round and {schedule.modes} modes"
    if share == 1:
        raise InputError(
            f"With {asked} no mode ever has {least} clients, so none would be updated. {change}"
        )
    if share > 0.05:
        return [
            f"With {asked}, {share:.0%} of the visits go to modes with fewer than {least} clients, in vain. {change}"
        ]
    return []


def weight_remarks(names: list[str], sizes: Tensor, weights: Tensor) -> list[str]:
    """What to know of clients that claim many more examples than others, [N] each."""
    remarks = []
    cut = (weights < sizes).nonzero().flatten().tolist()
    if cut:
        named = [
            f"{names[i]} ({int(sizes[i])}, counts as {float(weights[i]):g})" for i in cut[:_NAMED]
        ]
        more = f" and {len(cut) - _NAMED} more" if len(cut) > _NAMED else ""
        remarks.append(
            f"Clients that claim many more examples than the median: {', '.join(named)}{more}. If that is right, raise "
            "the run's setting `max-weight`, or set it to 0."
        )
    share, first = float(weights.max() / weights.sum()), int(weights.argmax())
    if share > max(MOST, 1.5 / len(weights)):
        remarks.append(
            f"{names[first]} has {share:.0%} of the fleet's weight, by the examples it claims, and decides the result. "
            "With algorithm.weighting = 'uniform' all clients count alike."
        )
    return remarks
