"""The base class of engines, which execute plans: on one device, several, or real clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from ..flat_params import Tree
from ..registry import Registry
from .algorithm import Algorithm
from .types import EnsembleState, Plan, RoundResult

engines: Registry[type[Engine]] = Registry("engine", lambda: Engine)


class Engine(ABC):
    """Executes the visits of a plan, and owns the training loops, the data and the client state.

    All other components are pure functions. A round calls `visit`, then the server's step, then
    `review` and `commit`. `visit` must not change client state: it holds the new state separately
    until `commit`, so that a round that raises changes nothing.

    An engine that `Federation` constructs takes `(learner, data, work, seed, **options)`.
    """

    notes: Sequence[str] = ()  # notes for the user; an engine may append to them during training
    precision: str = ""  # matmul precision, such as "tf32" or "float64", if known
    writes: bool = True  # True on the rank that writes files (rank 0)
    # pairs (first round, counted from 0; number of visits that are trained at once from then on)
    blocks: Sequence[tuple[int, int]] = ()

    @abstractmethod
    def visit(
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

    def commit(self) -> None:  # noqa: B027 (not every engine holds client state)
        """Stores the client state of the last `visit`; called after the server's step."""

    def foresee(self, plan: Plan, round: int) -> None:  # noqa: B027 (most engines have nothing to prepare)
        """Prefetches the plan that most likely comes next."""

    def agree(self, modes: Tree) -> Tree:
        """The modes after the server's step, made identical on all ranks of a job."""
        return modes

    def numerics(self) -> Tree:
        """Choices that change the last bits of results, such as block sizes, for a checkpoint."""
        return {}

    def keep_numerics(self, tensors: Tree) -> None:  # noqa: B027 (not every engine has such choices)
        """Restores the choices that `numerics` returned; ignores those that do not fit."""

    def read_memory(self, plan: Plan, fresh: Tree) -> Tree:
        """The client state of each visit of a plan, [J, ...], without training.

        Args:
            fresh: the state of clients that have not trained the mode yet, [J, ...]. An engine that
                cannot read client state returns it for all visits.
        """
        return fresh

    @abstractmethod
    def memory_tensors(self) -> Tree:
        """All client state as named tensors, for a checkpoint."""

    @abstractmethod
    def load_memory(self, tensors: Tree) -> None:
        """Restores the client state that `memory_tensors` returned."""
