"""Local training: each client trains a model of its own, and nothing is sent.

Client:  v_i <- local SGD from v_i on f_i, which stays on the client.

It is the baseline that personal models must beat.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...core.algorithm import algorithms
from ...core.problem import LocalProblem
from ...core.types import Cohort
from ...flat_params import Tree
from .ditto import Ditto


@algorithms.register("local")
@dataclass(frozen=True, kw_only=True)
class Local(Ditto):
    """Each client trains on its own; the modes keep their initial values.

    The models of clients start from the modes, and are trained in the rounds that select them, as
    those of other algorithms. `Federation.personal_models` returns them.

    Args:
        lam: strength of a pull of the models towards their start; 0 for none.
    """

    sends = "nothing up, nothing down"

    lam: float = 0.0

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        return {"theta": sent["theta"]}, self._train_personal(sent, memory, problem)

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        return mode

    # Everybody can make the initial models from the run's seed.
    def upload_bytes(
        self, uploads: Tree, shared_draw: Tensor, sent: Tree | None = None
    ) -> int | Tensor:
        return 0

    def download_bytes(
        self, sent: Tree, shared_draw: Tensor, memory: Tree | None = None
    ) -> int | Tensor:
        return 0

    def buffer_bytes(self, buffers: Tensor) -> int:
        return 0
