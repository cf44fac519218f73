"""Data types of a training round: plan, state, result and report.

Symbols: N clients, K modes, J visits in a round, P parameters, R values of running statistics.

One round passes these types along:

1. The schedule returns a `Plan`: which client trains which mode. A participation model may replace
   it by an `Outcome`: the part of the plan whose clients reply in time.
2. The engine trains the plan's visits and returns a `RoundResult`: each mode's weighted mean upload
   and a `Cohort`, which says how many clients stand behind it.
3. The algorithm's server step returns the next `EnsembleState`, and the caller gets a
   `RoundReport`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .. import prng
from ..display import report_line, report_table
from ..flat_params import Tree


class Plan(NamedTuple):
    """The J visits of a round: in visit j, client `client[j]` trains mode `mode[j]`."""

    client: Tensor  # [J] int64
    mode: Tensor  # [J] int64
    steps: Tensor | None = None  # [J] int64 local steps of each visit; None: those of `LocalWork`

    def select(self, index: Tensor) -> Plan:
        """The plan of the visits at `index`: their positions, or True for each of them."""
        return Plan(*(None if values is None else values[index] for values in self))  # type: ignore[arg-type]

    def tensors(self) -> Tree:
        """The tensors of the plan by name, without those that are None."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class GatheredUploads(NamedTuple):
    """The upload of each visit in ascending order of (client, mode), if the algorithm gathers."""

    client: Tensor  # [J] int64
    mode: Tensor  # [J] int64
    weight: Tensor  # [J] aggregation weights
    uploads: Tree  # [J, P]
    buffers: Tensor  # [J, R] running statistics after local training

    def shares(self, modes: int) -> Tensor:
        """The share of each visit in its mode, [K, J]; rows sum to 1, or to 0 without clients."""
        visit_weight = (
            self.mode == torch.arange(modes, device=self.mode.device).unsqueeze(1)
        ) * self.weight
        total = visit_weight.sum(1, keepdim=True)
        return visit_weight / torch.where(total > 0, total, torch.ones_like(total))


@dataclass(frozen=True, slots=True)
class Cohort:
    """The clients behind each mode's update."""

    count: Tensor  # [K, 1] number of clients that trained the mode in this round
    weight: Tensor  # [K, 1] sum of their aggregation weights
    share: Tensor  # [K, 1] that sum divided by the sum over all N clients; M/N if uniform
    population: int  # N
    shared_draw: (
        Tensor  # [K, 1] a random draw in (0, 1) that the server shares with the mode's clients
    )
    members: GatheredUploads | None = None  # the upload of each client, if the algorithm gathers
    round: int = 0  # counted from 0; set by every engine
    # learning rate of local training in this round; set by every engine. [K, 1] if the modes are
    # those of several runs that train together with different rates
    lr: float | Tensor = math.nan
    least: int = 1  # clients that a mode's update needs; a fleet sets its `min-cohort`

    @property
    def coin(self) -> Tensor:
        """The earlier name of `shared_draw`."""
        return self.shared_draw

    def key(self, word: int) -> Tensor:
        """A PRNG key for the server, one per mode and word, [K].

        The key is made of the first 53 bits of the shared random draw (24 bits if the draw is
        float32). The draw is the same on every engine, and so is the key.
        """
        return torch.as_tensor(
            prng.fold_in((self.shared_draw.double() * 2.0**53).long().squeeze(-1), word)
        )

    def uniform(self, like: Tensor) -> Tensor:
        """Random values in (0, 1) for the server, shaped like `like`, [K, P].

        The values change from round to round; repeated calls in one round return the same values.
        """
        return prng.uniform(self.key(0), like.shape[-1]).to(like.dtype)


class VisitReports(NamedTuple):
    """What the server learns of the J visits of a round, if the schedule asks for it."""

    loss: Tensor  # [J] of the model as received, the mean over the client's rows
    gradient_norm: Tensor  # [J] norm of its gradient
    update_norm: Tensor  # [J] length of the update: what the visit uploaded, against no training
    round: int  # counted from 0


class RoundResult(NamedTuple):
    """What an engine returns after it has run the visits of a round."""

    uploads: Tree  # [K, P] weighted mean of each mode's uploads; zero for a mode without clients
    buffers: Tensor  # [K, R] the same mean of running statistics
    cohort: Cohort
    loss: Tensor  # [J] mean training loss of each visit
    first_bad_step: Tensor  # [J] first local step whose loss was not finite, or -1
    bytes_up: Tensor  # [J]
    bytes_down: Tensor  # [J]
    # the J visits that count, if real clients were asked and some of them did not reply
    answered: Plan | None = None
    reports: VisitReports | None = None  # if `Engine.reports_visits`


@dataclass(frozen=True, slots=True)
class EnsembleState:
    """The server's state. Client state is not part of it; the engine holds that."""

    round: int  # number of completed rounds
    modes: Tree  # [K, P] server state of each mode; "theta" holds the model parameters
    buffers: Tensor  # [K, R] running statistics of each mode
    schedule: Tree = field(default_factory=dict)
    participation: Tree = field(default_factory=dict)  # such as the simulated clock
    average: Tree = field(default_factory=dict)  # [K, ...] averages of each mode over rounds

    def tensors(self, memory: Tree) -> Tree:
        """All tensors that training changes, by name: this state and the client state `memory`."""
        groups = {
            "modes": self.modes,
            "schedule": self.schedule,
            "memory": memory,
            "participation": self.participation,
            "average": self.average,
        }
        named = {
            f"{group}/{name}": tensor
            for group, tree in groups.items()
            for name, tensor in tree.items()
        }
        return {**named, "buffers": self.buffers}

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], round: int, device: torch.device | str
    ) -> tuple[EnsembleState, Tree]:
        """The state after `round` rounds and the client state, from the result of `tensors`."""

        def group(prefix: str) -> Tree:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        modes, average = (
            {name: tensor.to(device) for name, tensor in group(prefix).items()}
            for prefix in ("modes/", "average/")
        )
        state = cls(
            round,
            modes,
            tensors["buffers"].to(device),
            group("schedule/"),
            group("participation/"),
            average,
        )
        return state, group("memory/")


class ParticipationStats(NamedTuple):
    """Participation in one round; `asked` = visits that count + `late` + `dropped`."""

    asked: int
    late: int  # finished after all places were taken, or after the deadline
    dropped: int  # started but never replied
    away: int  # places for which no client was available
    seconds: float  # simulated duration of the round
    clock: float  # simulated time since the start of training, including this round
    bytes_down: int  # sent to all clients that were asked


class Outcome(NamedTuple):
    """The visits of a round whose replies count."""

    plan: Plan
    state: Tree  # the participation's state after the round
    turnout: ParticipationStats | None = None  # None if all clients reply at once


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A summary of one round for the caller."""

    round: int  # counted from 1
    age: int  # counted from 1; an age is K rounds
    plan: Plan
    loss: float | None  # mean over visits; None if no client replied
    losses: Tensor  # [J], on the CPU
    bytes_up: int  # sum over visits
    bytes_down: int  # sum over visits, or over all clients that were asked
    trained: tuple[int, ...]  # modes that had at least one client
    turnout: ParticipationStats | None = None  # replies and simulated time, if simulated

    def __repr__(self) -> str:
        """Round, loss, visits, modes and bytes, on one line, without the tensors."""
        return report_line(self)

    def _repr_html_(self) -> str:
        return report_table(self)
