"""FedProx: FedAvg with a proximal term that penalizes the distance to the received model.

w_i = local SGD from w on f_i(v) + mu/2 ||v - w||^2, whose gradient is grad f_i(v) + mu (v - w);
then as FedAvg. Stragglers upload their model after a random fraction of their steps, and it is
averaged like any other; see `core/visits/partial_work.py`.

Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous
networks", MLSys 2020.
"""

from dataclasses import dataclass

from torch import Tensor

from ..core.algorithm import algorithms
from ..core.problem import LocalProblem
from ..errors import InputError
from ..flat_params import Tree
from .fedavg import FedAvg


@algorithms.register("fedprox")
@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term; with mu = 0 it is FedAvg.

    Args:
        mu: strength of the proximal term.
        stragglers: probability that a visit stops early, after a number of steps that is uniform
            from one to all of them: the option of the same name of the participation, which works
            with every algorithm. (The paper counts epochs and selects a fixed share of the clients
            of a round; here each visit is drawn independently.)
    """

    reference = "Li et al. 2020"

    mu: float = 0.01
    stragglers: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mu >= 0:
            raise InputError(f"FedProx needs mu >= 0; got {self.mu}.")
        if not 0 <= self.stragglers <= 1:
            raise InputError(f"FedProx needs 0 <= stragglers <= 1; got {self.stragglers}.")

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        start = sent["theta"]

        def add_proximal_term(theta: Tensor, gradient: Tensor) -> Tensor:
            return gradient + self.mu * (theta - start)

        return {"theta": problem.descend(start, add_proximal_term)}, memory
