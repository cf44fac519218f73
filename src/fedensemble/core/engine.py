"""The base class of engines, which execute plans: on one device, several, or real clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import DivergedError
from ..flat_params import Tree
from ..registry import Registry
from ..renamed import adopt_earlier_names
from .algorithm import Algorithm
from .types import EnsembleState, Plan, RoundResult

engines: Registry[type[Engine]] = Registry("engine", lambda: Engine, "engines")

# Arguments that `Federation` passes to an engine, so that they are not options. "learner" is the
# earlier name of "model".
ENGINE_ARGUMENTS = ("model", "learner", "data", "work", "seed")

_RENAMED = {
    "visit": "run_visits",
    "foresee": "prefetch",
    "agree": "broadcast_state",
    "writes": "is_writer",
    "keep_numerics": "load_numerics",
    "read_memory": "read_client_state",
    "memory_tensors": "client_state_tensors",
    "load_memory": "load_client_state",
}


class Engine(ABC):
    """Executes the visits of a plan, and owns the training loops, the data and the client state.

    All other components are pure functions. A round calls `run_visits`, then the server's step,
    then `review` and `commit`. `run_visits` must not change client state: it holds the new state
    separately until `commit`, so that a round that raises changes nothing.

    An engine that `Federation` constructs takes `(model, data, work, seed, **options)`; the first
    four are passed by position.
    """

    # whether `run_visits` fills `RoundResult.reports`; a federation sets it if its schedule asks
    reports_visits: bool = False
    notes: Sequence[str] = ()  # notes for the user; an engine may append to them during training
    precision: str = ""  # matmul precision, such as "tf32" or "float64", if known
    is_writer: bool = True  # True on the rank that writes files (rank 0)
    # pairs (first round, counted from 0; number of visits that are trained at once from then on)
    blocks: Sequence[tuple[int, int]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adopt_earlier_names(cls, _RENAMED)

    @abstractmethod
    def run_visits(
        self, algorithm: Algorithm, sent: Tree, buffers: Tensor, plan: Plan, round: int
    ) -> RoundResult:
        """Trains all visits of the plan; new client state takes effect with `commit`.

        Args:
            sent: what is broadcast, one row per mode, [K, P].
            buffers: running statistics, one row per mode, [K, R].
            round: counted from 0.
        """

    def review(self, before: EnsembleState, after: EnsembleState) -> RoundResult | None:
        """A corrected result if the server's step failed, such as with a nan; None if it is fine.

        Args:
            before, after: the states before and after the server's step.
        """
        return None

    def reject_coupling(self, error: DivergedError) -> None:
        """Called if coupling the modes gave nan or infinity; raises the error.

        An engine of real clients logs it instead: the modes of the round then stay uncoupled.
        """
        raise error

    def commit(self) -> None:  # noqa: B027 (not every engine holds client state)
        """Stores the client state of the last `run_visits`; called after the server's step."""

    def prefetch(self, plan: Plan, round: int) -> None:  # noqa: B027 (most engines have nothing to prepare)
        """Prefetches the plan that most likely comes next."""

    def broadcast_state(self, modes: Tree) -> Tree:
        """The modes after the server's step, made identical on all ranks of a job."""
        return modes

    def numerics(self) -> Tree:
        """Choices that change the last bits of results, such as block sizes, for a checkpoint."""
        return {}

    def load_numerics(self, tensors: Tree) -> None:  # noqa: B027 (not every engine has such choices)
        """Restores the choices that `numerics` returned; ignores those that do not fit."""

    def read_client_state(self, plan: Plan, fresh: Tree) -> Tree:
        """The client state of each visit of a plan, [J, ...], without training.

        Args:
            fresh: the state of clients that have not trained the mode yet, [J, ...]. An engine that
                cannot read client state returns it for all visits.
        """
        return fresh

    @abstractmethod
    def client_state_tensors(self) -> Tree:
        """All client state as named tensors, for a checkpoint."""

    @abstractmethod
    def load_client_state(self, tensors: Tree) -> None:
        """Restores the client state that `client_state_tensors` returned."""
