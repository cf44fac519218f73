"""The base class of schedules: which clients train which mode in a round.

These are not learning-rate schedules. `Algorithm.learning_rate` gives the learning rate of a round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..errors import InputError, setting
from ..flat_params import Tree
from ..registry import Registry
from ..renamed import adopt_earlier_names
from .types import Plan, VisitReports

MOST_MODES = 100_000  # K; initializing so many takes a minute even for a tiny model

schedules: Registry[type[Schedule]] = Registry("schedule", lambda: Schedule, "schedules")

_RENAMED = {"one_mode_a_client": "one_mode_per_client"}


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """A rule that makes each round's plan from the seed, the round and, if it wants, the losses.

    On average, every client should be selected equally often, and train every mode equally often.
    Otherwise the fixed point of FedAvg moves towards some clients. A schedule that prefers some
    clients on purpose sets `uniform = False`.

    Args:
        modes: K, the number of models in the ensemble.
        strata: Q, the number of groups of clients; a group trains one mode together in a round.
        clients_per_round: M, the number of clients per round.
    """

    # a client trains at most one mode per round; False if the modes are trained independently
    one_mode_per_client: ClassVar[bool] = True
    # each mode is trained as a separate run that has nothing in common with the others
    trains_apart: ClassVar[bool] = False
    uniform: ClassVar[bool] = True  # all clients are selected equally often on average
    # `observe` gets reports of the visits, which cost each client one more pass over its rows
    needs_reports: ClassVar[bool] = False

    modes: int = 5
    strata: int = 1
    clients_per_round: int = 10

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adopt_earlier_names(cls, _RENAMED)

    def check(self, population: int) -> None:
        """Raises if this schedule cannot be used with `population` clients."""
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
                f"clients={population}. Lower {setting('ensemble.clients_per_round')}."
            )
        if q > population:
            raise InputError(
                f"Schedule '{name}' needs strata <= clients; got strata={q}, clients={population}. "
                f"Lower {setting('ensemble.strata')}."
            )
        if q > m:
            raise InputError(
                f"Schedule '{name}' needs strata <= clients_per_round, or a mode could not visit "
                f"every stratum in an age; got strata={q}, clients_per_round={m}. "
                f"Lower {setting('ensemble.strata')} or raise "
                f"{setting('ensemble.clients_per_round')}."
            )

    @property
    def clients_per_mode(self) -> float:
        """Mean number of clients that train a mode in a round."""
        return self.clients_per_round / self.modes

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about these settings."""
        return ()

    @abstractmethod
    def init(self, population: int, seed: int) -> Tree:
        """The schedule's state for N clients; tensors, so that it can be saved."""

    @abstractmethod
    def plan(self, state: Tree, round: int) -> Plan:
        """The visits of a round (counted from 0), sorted by client."""

    def stratum(self, state: Tree) -> Tensor | None:
        """The stratum of each client, [N]; None if the schedule has no strata."""
        return state.get("stratum")

    def observe(
        self, state: Tree, plan: Plan, loss: Tensor, reports: VisitReports | None = None
    ) -> Tree:
        """The schedule's state after a round; by default unchanged.

        Override it for a schedule that depends on losses. It is called after every round in which a
        client replied. Its result is the `state` of the next `plan`, and a checkpoint contains it.
        It must not write into `state`, nor change names, shapes or dtypes: return a new dict.
        Because the next plan is then unknown while a round is trained, the engine does not prefetch
        the data of the next round.

        Args:
            state: before the round.
            plan: the J visits that count, without clients that did not reply.
            loss: mean training loss of each visit, [J], on the CPU and finite.
            reports: of the visits, if the schedule sets `needs_reports`: loss and gradient norm of
                the model as received, length of the update, and the round. Overrides of schedules
                that do not set it may omit the argument.
        """
        return state


def check_number(schedule: str, what: str, value: object) -> None:
    """Raises unless an argument is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"Schedule '{schedule}' needs an integer for {what}; got {value!r}.")
    if value < 1:
        raise InputError(f"Schedule '{schedule}' needs {what} >= 1; got {value}.")
    if what == "modes" and value > MOST_MODES:
        raise InputError(
            f"Schedule '{schedule}' needs modes <= {MOST_MODES:,}; got {value:,}. "
            f"Lower {setting('ensemble.modes')}."
        )
