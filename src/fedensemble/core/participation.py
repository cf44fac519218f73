"""Whose answers count in a round, and how long the round takes on a simulated clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..flat_params import Tree
from ..registry import Registry
from .algorithm import Algorithm
from .batches import LocalWork
from .keys import shared_uniform
from .probe import Messages, probe
from .schedule import Schedule
from .traffic import bytes_down, bytes_up, sees
from .types import Outcome, Plan

participations: Registry[type[Participation]] = Registry("participation", lambda: Participation)


class Costs:
    """What visits cost: examples to go through, and bytes down and up.

    Args:
        theta: weights of one model, [P]; only their number and type count.
        carried: bytes of running statistics, which travel both ways.
        sizes: examples of each client, [N].
        seed: of the run.
        look: gives what is sent to a plan's visits and what their clients remember, [J, ...] each;
            without it `of_visits` counts ordinary messages.
    """

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
        self._algorithm, self._theta, self._carried, self._seed = algorithm, theta, carried, seed
        self.samples = work.samples(sizes.cpu())  # [N] a round

    @cached_property
    def _messages(self) -> Messages:
        return probe(self._algorithm, self._theta)

    def seeing(self, look: Callable[[Plan], tuple[Tree, Tree]]) -> Costs:
        """The same costs with a view of what is sent and remembered now."""
        other = copy(self)
        other.look = look
        return other

    def of_visits(self, round: int, plan: Plan) -> tuple[Tensor, Tensor]:
        """Bytes down and bytes up of each visit of a plan, [J] each, as the engine will count
        them.
        """
        algorithm = self._algorithm
        looking = any(sees(type(algorithm), name) for name in ("upload_bytes", "download_bytes"))
        if self.look is None or not looking or not len(plan.client):
            down, up = self.traffic(round, 1 + max(plan.mode.tolist(), default=0))
            return down[plan.mode], up[plan.mode]
        sent, memory = self.look(plan)
        coin = shared_uniform(self._seed, round, plan.mode).to(self._theta.dtype)
        down = torch.as_tensor(bytes_down(algorithm, sent, memory, coin)).cpu()
        up = torch.as_tensor(bytes_up(algorithm, self._messages.uploads, sent, coin)).cpu()
        visits = len(plan.mode)
        return self._carried + down.expand(visits, 1)[:, 0], self._carried + up.expand(visits, 1)[
            :, 0
        ]

    def traffic(self, round: int, modes: int) -> tuple[Tensor, Tensor]:
        """Bytes down and bytes up of an ordinary visit to each mode, [K] each: of a client that has
        missed nothing.
        """
        coin = shared_uniform(self._seed, round, torch.arange(modes)).to(self._theta.dtype)
        down = self._carried + self._algorithm.download_bytes(self._messages.sent, coin)
        up = self._carried + self._algorithm.upload_bytes(self._messages.uploads, coin)
        return tuple(torch.as_tensor(size).expand(modes, 1)[:, 0] for size in (down, up))  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Participation(ABC):
    """A rule for who is asked and who answers, made from the seed, the round and the clock
    alone.
    """

    def asking(self, schedule: Schedule) -> Schedule:
        """The schedule that says who is asked: the given one, or one that asks more clients; raises
        if it cannot.
        """
        return schedule

    def init(self, population: int, seed: int) -> Tree:
        """The state before the first round of N clients: tensors, so that a checkpoint can hold
        it.
        """
        return {}

    @abstractmethod
    def outcome(
        self, state: Tree, schedule: Schedule, planned: Tree, round: int, costs: Costs
    ) -> Outcome:
        """Whose answers count in a round (counted from 0); nothing is changed.

        Args:
            schedule: whose `clients_per_round` answers are wanted.
            planned: its state; `self.asking(schedule).plan(planned, round)` are the visits asked
                for.
        """


@participations.register("everybody")
@dataclass(frozen=True, kw_only=True)
class Everybody(Participation):
    """Whoever is asked answers, and no time is simulated; the default."""

    def outcome(
        self, state: Tree, schedule: Schedule, planned: Tree, round: int, costs: Costs
    ) -> Outcome:
        return Outcome(schedule.plan(planned, round), state)
