"""FedDyn: a client's objective is tilted so that, at its own optimum, it agrees with the others.

w_i = local SGD from w on f_i(v) - <h_i, v> + alpha/2 ||v - w||^2;   h_i <- h_i - alpha (w_i - w);
h <- h - alpha share mean_S (w_i - w);   w <- mean_S w_i - h / alpha.
The share is that of S in the weights of all clients, M/N if they are uniform.

Reference: Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, "Federated learning based on dynamic
regularization", ICLR 2021.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, algorithms
from ..core.problem import LocalProblem
from ..core.types import Cohort
from ..errors import InputError
from ..flat_params import Tree


@algorithms.register("feddyn")
@dataclass(frozen=True, kw_only=True)
class FedDyn(Algorithm):
    """Dynamic regularisation; h_i is the client's last gradient, h their mean.

    Made for partial participation: those who do not take part keep their h_i, and h stays the
    weighted mean of all N. The paper weighs all clients alike, which is `weighting = "uniform"`.

    Args:
        alpha: strength of the pull towards the model that was sent; h / alpha is how far the server
            steps beyond the mean, so that a small alpha is the bold choice.
    """

    reference = "Acar et al. 2021"
    sends = "model up, model down"

    alpha: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha > 0:
            raise InputError(f"FedDyn needs alpha > 0; got {self.alpha}.")

    def init_mode(self, theta: Tensor) -> Tree:
        return {"theta": theta, "h": torch.zeros_like(theta)}

    def init_memory(self, theta: Tensor) -> Tree:
        return {"h": torch.zeros_like(theta)}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        start, h = sent["theta"], memory["h"]
        theta = problem.descend(
            start, lambda at, gradient: gradient - h + self.alpha * (at - start)
        )
        return {"theta": theta}, {"h": h - self.alpha * (theta - start)}

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        h = mode["h"] - self.alpha * cohort.share * (uploads["theta"] - mode["theta"])
        return {"theta": uploads["theta"] - h / self.alpha, "h": h}
