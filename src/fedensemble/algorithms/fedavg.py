"""FedAvg: local training, then the weighted average.

w_i = local SGD from w on client i;   w <- sum_i p_i w_i / sum_i p_i.

Reference: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of
deep networks from decentralized data", AISTATS 2017.
"""

from dataclasses import dataclass

from ..core.algorithm import Algorithm, algorithms
from ..core.problem import LocalProblem
from ..core.types import Cohort
from ..flat_params import Tree


@algorithms.register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """Federated averaging; in an ensemble, each mode is averaged over the clients that trained it.

    >>> FedAvg(lr=0.05, lr_decay=0.99).learning_rate(round=10)
    0.0495
    """

    reference = "McMahan et al. 2017"
    sends = "model up, model down"

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        return {"theta": problem.descend(sent["theta"])}, memory

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        return {"theta": uploads["theta"]}
