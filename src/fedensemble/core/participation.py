"""Whose answers count in a round, and how long the round takes on a simulated clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..registry import Registry
from ..vectors import Tree
from .algorithm import Algorithm
from .batches import LocalWork
from .keys import shared_coin
from .probe import Messages, probe
from .schedule import Schedule
from .types import Outcome

participations: Registry[type[Participation]] = Registry("participation", lambda: Participation)


class Costs:
    """What visits cost: examples to go through, and bytes down and up.

    Args:
        theta: weights of one model, [P]; only their number and type count.
        carried: bytes of running statistics, which travel both ways.
        sizes: examples of each client, [N].
        seed: of the run.
    """

    def __init__(
        self, algorithm: Algorithm, theta: Tensor, carried: int, sizes: Tensor, work: LocalWork, seed: int
    ) -> None:
        self._algorithm, self._theta, self._carried, self._seed = algorithm, theta, carried, seed
        self.samples = work.samples(sizes.cpu())  # [N] a round

    @cached_property
    def _messages(self) -> Messages:
        return probe(self._algorithm, self._theta)

    def traffic(self, round: int, modes: int) -> tuple[Tensor, Tensor]:
        """Bytes down and bytes up of a visit to each mode, [K] each."""
        coin = shared_coin(self._seed, round, torch.arange(modes)).to(self._theta.dtype)
        down = self._carried + self._algorithm.download_bytes(self._messages.sent, coin)
        up = self._carried + self._algorithm.upload_bytes(self._messages.uploads, coin)
        return tuple(torch.as_tensor(size).expand(modes, 1)[:, 0] for size in (down, up))  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Participation(ABC):
    """A rule for who is asked and who answers, made from the seed, the round and the clock alone."""

    def asking(self, schedule: Schedule) -> Schedule:
        """The schedule that says who is asked: the given one, or one that asks more clients; raises if it cannot."""
        return schedule

    def init(self, population: int, seed: int) -> Tree:
        """The state before the first round of N clients: tensors, so that a checkpoint can hold it."""
        return {}

    @abstractmethod
    def outcome(self, state: Tree, schedule: Schedule, planned: Tree, round: int, costs: Costs) -> Outcome:
        """Whose answers count in a round (counted from 0); nothing is changed.

        Args:
            schedule: whose `clients_per_round` answers are wanted.
            planned: its state; `self.asking(schedule).plan(planned, round)` are the visits asked for.
        """


@participations.register("everybody")
@dataclass(frozen=True, kw_only=True)
class Everybody(Participation):
    """Whoever is asked answers, and no time is simulated; the default."""

    def outcome(self, state: Tree, schedule: Schedule, planned: Tree, round: int, costs: Costs) -> Outcome:
        return Outcome(schedule.plan(planned, round), state)
