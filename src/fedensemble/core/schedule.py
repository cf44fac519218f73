"""Who trains which mode in a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..errors import InputError
from ..flat_params import Tree
from ..registry import Registry
from .types import Plan

MOST_MODES = 100_000  # K; making so many takes a minute even of a tiny model

schedules: Registry[type[Schedule]] = Registry("schedule", lambda: Schedule)


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """A rule that makes each round's plan from the seed and the round alone.

    Every client should be asked equally often on average, and train every mode equally often:
    otherwise the fixed point of FedAvg moves towards some clients. A schedule that prefers clients
    on purpose sets `uniform = False`.

    Args:
        modes: K, number of models in the ensemble.
        strata: Q, groups of clients that train one mode together in a round.
        clients_per_round: M.
    """

    one_mode_a_client: ClassVar[bool] = True  # within a round; False where models are trained apart
    # every client is asked equally often on average; False where some are preferred
    uniform: ClassVar[bool] = True

    modes: int = 5
    strata: int = 1
    clients_per_round: int = 10

    def check(self, population: int) -> None:
        """Raises if this schedule cannot serve `population` clients."""
        name, k, q, m = (
            schedules.name_of(type(self)) or type(self).__name__,
            self.modes,
            self.strata,
            self.clients_per_round,
        )
        for what, value in (("modes", k), ("strata", q), ("clients_per_round", m)):
            check_number(name, what, value)
        if m > population:
            raise InputError(
                f"Schedule '{name}' needs clients_per_round <= clients; got clients_per_round={m}, "
                f"clients={population}. Lower ensemble.clients_per_round."
            )
        if q > population:
            raise InputError(
                f"Schedule '{name}' needs strata <= clients; got strata={q}, clients={population}. "
                "Lower ensemble.strata."
            )
        if q > m:
            raise InputError(
                f"Schedule '{name}' needs strata <= clients_per_round, or a mode could not visit every stratum in an "
                f"age; got strata={q}, clients_per_round={m}. Lower ensemble.strata or raise "
                "ensemble.clients_per_round."
            )

    @property
    def clients_per_mode(self) -> float:
        """How many clients train a mode in a round, on average over the modes."""
        return self.clients_per_round / self.modes

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of these numbers."""
        return ()

    @abstractmethod
    def init(self, population: int, seed: int) -> Tree:
        """The schedule's state for N clients: tensors, so that a checkpoint can hold it."""

    @abstractmethod
    def plan(self, state: Tree, round: int) -> Plan:
        """The visits of a round (counted from 0), sorted by client."""

    def stratum(self, state: Tree) -> Tensor | None:
        """The stratum of each client, [N]; None where strata play no part."""
        return state.get("stratum")

    def observe(self, state: Tree, plan: Plan, loss: Tensor) -> Tree:
        """The state after a round's losses [J] are known; most schedules do not care."""
        return state


def check_number(schedule: str, what: str, value: object) -> None:
    """Raises unless an argument is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"Schedule '{schedule}' needs a whole number for {what}; got {value!r}.")
    if value < 1:
        raise InputError(f"Schedule '{schedule}' needs {what} >= 1; got {value}.")
    if what == "modes" and value > MOST_MODES:
        raise InputError(
            f"Schedule '{schedule}' needs modes <= {MOST_MODES:,}; got {value:,}. Lower ensemble.modes."
        )
