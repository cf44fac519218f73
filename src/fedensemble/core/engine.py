"""What carries out a plan: the only thing that differs between a laptop, a GPU and a fleet."""

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
    """Owns loops, data and client memory; everything else is pure."""

    notes: Sequence[str] = ()  # what a user should know of how the work is done
    precision: str = ""  # of products, such as "tf32" or "float64", where it is known
    writes: bool = True  # whether this process keeps files; of the processes of a job, one does
    # rounds (counted from 0) and the number of visits at once from then on
    blocks: Sequence[tuple[int, int]] = ()

    @abstractmethod
    def visit(
        self, algorithm: Algorithm, sent: Tree, buffers: Tensor, plan: Plan, round: int
    ) -> RoundResult:
        """Lets every client of the plan train its mode. What they are to remember waits for
        `commit`.

        Args:
            sent: what is broadcast, one row a mode, [K, P].
            buffers: running statistics, one row a mode, [K, R].
            round: counted from 0.
        """

    def review(self, before: EnsembleState, after: EnsembleState) -> RoundResult | None:
        """What counts in place of what the last visit gave, where the server's step went wrong;
        None if it did not.
        """
        return None

    def commit(self) -> None:  # noqa: B027 (not every engine keeps clients' memory)
        """The server has taken its step: clients remember what the last visit gave them."""

    def foresee(self, plan: Plan, round: int) -> None:  # noqa: B027 (most engines have nothing to prepare)
        """Told of the plan that most likely comes next, an engine may prepare for it."""

    def agree(self, modes: Tree) -> Tree:
        """The modes after the server's step, the same in all processes of a job."""
        return modes

    def numerics(self) -> Tree:
        """Choices that change the last bits of results, such as a block's size, as named tensors
        for a checkpoint.
        """
        return {}

    def keep_numerics(self, tensors: Tree) -> None:  # noqa: B027 (not every engine has such choices)
        """Makes the choices that `numerics` gave again; ignores those that do not fit this engine
        or device.
        """

    def read_memory(self, plan: Plan, fresh: Tree) -> Tree:
        """What the plan's clients remember of its modes, [J, ...], without training them.

        Args:
            fresh: what those remember that have not trained the mode yet, [J, ...]; an engine that
                cannot look into its clients returns it for all.
        """
        return fresh

    @abstractmethod
    def memory_tensors(self) -> Tree:
        """Client memory as named tensors, for a checkpoint."""

    @abstractmethod
    def load_memory(self, tensors: Tree) -> None:
        """Puts back what `memory_tensors` gave."""
