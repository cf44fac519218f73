"""Participation: which clients reply in a round, and how long it takes on a simulated clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import InputError
from ..flat_params import Tree
from ..registry import Registry
from ..renamed import adopt_earlier_names
from .algorithm import Algorithm
from .hyperparameters import check_hyperparameters
from .probe import Messages, probe
from .schedule import Schedule
from .types import Outcome, Plan
from .visits.batches import LocalWork
from .visits.partial_work import stop_early
from .visits.traffic import bytes_down, bytes_up, takes_optional_argument
from .visits.visit_keys import shared_uniform

participations: Registry[type[Participation]] = Registry(
    "participation", lambda: Participation, "participation"
)


_RENAMED = {"asking": "selection_schedule"}


class Costs:
    """The costs of visits: examples to process, and bytes to download and upload.

    Args:
        theta: parameters of one model, [P]; only their number and dtype matter.
        carried: bytes of running statistics, which are both downloaded and uploaded.
        sizes: number of examples of each client, [N].
        seed: seed of the run.
    """

    # Returns what is sent to each visit of a plan, and its client state, [J, ...] each. Without
    # it, `of_visits` counts ordinary messages.
    look: Callable[[Plan], tuple[Tree, Tree]] | None = None

    def __init__(
        self,
        algorithm: Algorithm,
        theta: Tensor,
        carried: int,
        sizes: Tensor,
        work: LocalWork,
        seed: int,
    ) -> None:
        self._algorithm, self._theta, self._carried, self.seed = algorithm, theta, carried, seed
        self._work, self._sizes = work, sizes.cpu()
        self.samples = work.samples(self._sizes)  # [N] per visit, unless a plan asks for other work

    @cached_property
    def messages(self) -> Messages:
        """The names, shapes and dtypes of states and messages."""
        return probe(self._algorithm, self._theta)

    def seeing(self, look: Callable[[Plan], tuple[Tree, Tree]]) -> Costs:
        """A copy of these costs that looks up the current messages and client states."""
        costs = copy(self)
        costs.look = look
        return costs

    def steps(self, plan: Plan) -> Tensor:
        """Local steps of each visit of a plan, [J]."""
        return self._work.count(self._sizes[plan.client]) if plan.steps is None else plan.steps

    def examples(self, plan: Plan) -> Tensor:
        """Examples that each visit of a plan processes, [J]."""
        return self._work.samples(self._sizes[plan.client], plan.steps)

    def of_visits(self, round: int, plan: Plan) -> tuple[Tensor, Tensor]:
        """Bytes down and up of each visit of a plan, [J] each, equal to the engine's own count."""
        algorithm = self._algorithm
        varies = any(
            takes_optional_argument(type(algorithm), name)
            for name in ("upload_bytes", "download_bytes")
        )
        if self.look is None or not varies or not len(plan.client):
            down, up = self.traffic(round, 1 + max(plan.mode.tolist(), default=0))
            return down[plan.mode], up[plan.mode]
        sent, memory = self.look(plan)
        shared_draw = shared_uniform(self.seed, round, plan.mode).to(self._theta.dtype)
        down = torch.as_tensor(bytes_down(algorithm, sent, memory, shared_draw)).cpu()
        up = torch.as_tensor(bytes_up(algorithm, self.messages.uploads, sent, shared_draw)).cpu()
        down, up = (size.expand(len(plan.mode), 1)[:, 0] for size in (down, up))
        return self._carried + down, self._carried + up

    def traffic(self, round: int, modes: int) -> tuple[Tensor, Tensor]:
        """Bytes down and up of an ordinary visit to each mode, [K] each.

        In an ordinary visit the client has missed no earlier round of its mode.
        """
        shared_draw = shared_uniform(self.seed, round, torch.arange(modes)).to(self._theta.dtype)
        down = self._carried + self._algorithm.download_bytes(self.messages.sent, shared_draw)
        up = self._carried + self._algorithm.upload_bytes(self.messages.uploads, shared_draw)
        return tuple(torch.as_tensor(size).expand(modes, 1)[:, 0] for size in (down, up))  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Participation(ABC):
    """A rule for which clients are selected, which of them reply, and how much work they do.

    It depends on the seed, the round and the simulated clock only.

    Args:
        stragglers: probability that a visit stops early, after a number of local steps that is
            uniform from one to all of them, and uploads what it has. None is 0.
    """

    # `outcome` calls `limit_steps` itself, because its clock needs the steps
    limits_steps: ClassVar[bool] = False

    # None and not 0: a setting that is None is not part of a run's hash.
    stragglers: float | None = None

    def __post_init__(self) -> None:
        check_hyperparameters(self)
        if self.stragglers is not None and not 0 <= self.stragglers <= 1:
            name = participations.name_of(type(self)) or type(self).__name__
            raise InputError(
                f"Participation '{name}' needs 0 <= stragglers <= 1; got {self.stragglers}."
            )

    def limit_steps(self, plan: Plan, round: int, costs: Costs) -> Plan:
        """The plan with the local steps of visits that stop early."""
        if not self.stragglers:
            return plan
        return stop_early(plan, costs.steps(plan), self.stragglers, costs.seed, round)

    def selection_schedule(self, schedule: Schedule) -> Schedule:
        """The schedule that selects clients: `schedule`, or one with more clients per round.

        Raises InputError if it cannot select that many clients.
        """
        return schedule

    asking = selection_schedule  # the earlier name, also of overrides, see `__init_subclass__`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adopt_earlier_names(cls, _RENAMED)
        cls.asking = cls.selection_schedule

    def init(self, population: int, seed: int) -> Tree:
        """The state before the first round, for N clients; tensors, so that it can be saved."""
        return {}

    @abstractmethod
    def outcome(
        self, state: Tree, schedule: Schedule, planned: Tree, round: int, costs: Costs
    ) -> Outcome:
        """The visits whose replies count in a round (counted from 0); changes nothing.

        Args:
            state: the participation's state.
            schedule: its `clients_per_round` is the number of replies that count.
            planned: the schedule's state; `self.selection_schedule(schedule).plan(planned, round)`
                returns the selected visits.
            costs: what the visits cost.
        """


@participations.register("everybody")
@dataclass(frozen=True, kw_only=True)
class Everybody(Participation):
    """All selected clients reply, and no time is simulated; the default."""

    def outcome(
        self, state: Tree, schedule: Schedule, planned: Tree, round: int, costs: Costs
    ) -> Outcome:
        return Outcome(schedule.plan(planned, round), state)
