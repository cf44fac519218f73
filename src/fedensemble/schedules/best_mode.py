"""Assigns modes by loss: clients train the mode that suits them best, compared with others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.schedule import schedules
from ..core.types import Plan, VisitReports
from ..flat_params import Tree
from .balanced import Balanced
from .worst_mode import with_worst_modes

_WORST = 1e300  # stands for an infinite loss; sums of it are finite


@schedules.register("best-mode")
@dataclass(frozen=True, kw_only=True)
class BestMode(Balanced):
    """Clients train the mode that suits them best, so that modes specialise on groups of clients.

    After each visit the server knows the loss of the mode as the client received it. It keeps its
    relative difference from the mean over all clients that received the mode in this round, and the
    client trains the mode in which this is lowest. Modes that a client has not trained yet come
    first. Clients are selected as with `balanced`, all equally often.

    It finds groups as IFCA does, with one mode per visit instead of all K, but later. Each mode
    needs several clients in a round. Modes may have few visits in a round or none.
    """

    needs_reports: ClassVar[bool] = True

    def init(self, population: int, seed: int) -> Tree:
        state = super().init(population, seed)  # first, because it checks the options
        # The last relative loss of each client and mode; minus infinity if unknown.
        return {**state, "loss": torch.full((population, self.modes), -torch.inf)}

    def plan(self, state: Tree, round: int) -> Plan:
        return with_worst_modes(super().plan(state, round), -state["loss"])

    def observe(
        self, state: Tree, plan: Plan, loss: Tensor, reports: VisitReports | None = None
    ) -> Tree:
        if reports is None:
            return state
        known = state["loss"].clone()
        known[plan.client, plan.mode] = relative_losses(plan.mode, reports.loss, self.modes)
        return {**state, "loss": known}


def relative_losses(mode: Tensor, loss: Tensor, modes: int) -> Tensor:
    """The relative difference of each visit's loss from the mean of its mode, [J].

    Losses themselves cannot be compared: that of a mode which the client received many rounds ago
    is higher only because all modes had learnt less, and the client would never go back to it.

    Args:
        mode, loss: of each visit of a round, [J].
        modes: K.

    >>> relative_losses(torch.tensor([0, 0, 1]), torch.tensor([1.0, 3.0, 9.0]), 2).tolist()
    [-0.5, 0.5, 0.0]
    """
    # A loss that is nan is the worst, as infinity is, and not 0.
    loss = torch.nan_to_num(loss.double(), nan=_WORST, posinf=_WORST, neginf=-_WORST)
    one_hot = (mode == torch.arange(modes).unsqueeze(1)).double()  # [K, J]
    mean = (one_hot @ loss / one_hot.sum(1).clamp(min=1))[mode]
    tiny = torch.finfo(torch.float64).tiny
    # Losses of one's own may be negative: the sign of the mean must not turn the order around.
    return torch.nan_to_num((loss - mean) / mean.abs().clamp(min=tiny)).float()
