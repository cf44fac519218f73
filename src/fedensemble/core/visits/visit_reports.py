"""What the server learns of single visits, for schedules that assign modes by it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InputError
from ...flat_params import Tree
from ..schedule import Schedule, schedules
from ..types import RoundResult, VisitReports


def update_norms(uploads: Tree, unchanged: Tree) -> Tensor:
    """The length of each visit's update, [J]: its distance from an upload without training.

    Tensors of one value per visit are flags or counts, and no part of it.

    Args:
        uploads: [J, P] each.
        unchanged: the uploads of clients that learn nothing, see `expected_uploads`, [J, P].
    """
    squares = [
        (value - unchanged[name]).double().square().sum(-1)
        for name, value in uploads.items()
        if value.shape[-1] > 1
    ]
    first = next(iter(uploads.values()))
    return torch.stack(squares).sum(0).sqrt() if squares else first[..., 0].double() * 0


def make_reports(table: Tensor, round: int) -> VisitReports:
    """Reports from losses, gradient norms and lengths of updates, [3, J]."""
    loss, gradient, update = table
    return VisitReports(loss, gradient, update, round)


def reports_of(result: RoundResult, schedule: Schedule, round: int) -> VisitReports:
    """The reports of a round for its schedule, on the CPU; raises if the engine made none.

    Args:
        round: counted from 0.
    """
    if result.reports is None:
        name = schedules.name_of(type(schedule)) or type(schedule).__name__
        raise InputError(
            f"Schedule '{name}' needs reports of visits, which this engine does not make. Use "
            "engine 'vector' or 'loop', or fill `RoundResult.reports` if `Engine.reports_visits`."
        )
    loss, gradient, update = (value.detach().double().cpu() for value in result.reports[:3])
    return VisitReports(loss, gradient, update, round)
