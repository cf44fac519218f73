"""Assigns modes by loss: strata or clients train the mode at which they are worst."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.schedule import schedules
from ..core.types import Plan, VisitReports
from ..flat_params import Tree
from .balanced import Balanced


@schedules.register("worst-mode")
@dataclass(frozen=True, kw_only=True)
class WorstMode(Balanced):
    """Clients train the mode that has the highest loss on their data, as far as the server knows.

    After each visit the server knows the loss of the mode as the client received it. Modes that a
    client has not trained yet come first. Clients are selected as with `balanced`, all equally
    often.

    Args:
        once_per_age: whether each stratum trains every mode exactly once in an age, as in the
            paper: it begins with the mode of the highest mean loss over its clients, and ends with
            that of the lowest. If not, each client trains the mode at which it is worst itself, so
            that modes may have few visits or none.
    """

    needs_reports: ClassVar[bool] = True

    once_per_age: bool = False

    def init(self, population: int, seed: int) -> Tree:
        state = super().init(population, seed)
        # The last loss of each client and mode, and the mean losses of the strata at the start of
        # the age; infinite if unknown.
        unknown = torch.tensor(torch.inf)
        return {
            **state,
            "loss": unknown.repeat(population, self.modes),
            "order": unknown.repeat(self.strata, self.modes),
        }

    def permutations(self, state: Tree, age: int) -> Tensor:
        base = super().permutations(state, age)
        return worst_first(base, state["order"]) if self.once_per_age else base

    def plan(self, state: Tree, round: int) -> Plan:
        plan = super().plan(state, round)
        if self.once_per_age:
            return plan
        return with_worst_modes(plan, state["loss"])

    def observe(
        self, state: Tree, plan: Plan, loss: Tensor, reports: VisitReports | None = None
    ) -> Tree:
        if reports is None:
            return state
        known = state["loss"].clone()
        known[plan.client, plan.mode] = torch.nan_to_num(reports.loss.float())
        order = state["order"]
        if (reports.round + 1) % self.modes == 0:  # the next age begins
            order = stratum_means(known, state["stratum"], self.strata)
        return {**state, "loss": known, "order": order}


@schedules.register("worst-mode-once-per-age")
@dataclass(frozen=True, kw_only=True)
class WorstModeOncePerAge(WorstMode):
    """`worst-mode` with `once_per_age`: each stratum trains its worst mode first in an age."""

    once_per_age: bool = True


def with_worst_modes(plan: Plan, loss: Tensor) -> Plan:
    """The plan in which each client trains the mode of its highest loss.

    Of modes with equal losses, it trains the one that the plan says, or the next after it.

    Args:
        loss: of each client and mode, [N, K].
    """
    modes = loss.shape[1]
    shifted = (plan.mode.unsqueeze(1) + torch.arange(modes)) % modes
    return plan._replace(mode=worst_first(shifted, loss[plan.client])[:, 0])


def worst_first(modes: Tensor, loss: Tensor) -> Tensor:
    """Rows of modes in the order of falling losses; equal ones keep their order.

    Args:
        modes: a permutation of the K modes in each row, [Q, K].
        loss: of modes 0 to K - 1, [Q, K].

    >>> worst_first(torch.tensor([[2, 0, 1]]), torch.tensor([[0.5, 0.9, 0.5]])).tolist()
    [[1, 2, 0]]
    """
    order = torch.argsort(loss.gather(1, modes), dim=1, descending=True, stable=True)
    return modes.gather(1, order)


def stratum_means(loss: Tensor, stratum: Tensor, strata: int) -> Tensor:
    """Mean loss of each stratum over its clients whose loss is known, [Q, K]; else infinite."""
    known = loss.isfinite()
    sums, counts = (
        torch.zeros(strata, loss.shape[1]).index_add(0, stratum, value)
        for value in (torch.where(known, loss, 0.0), known.float())
    )
    return torch.where(counts > 0, sums / counts, torch.inf)
