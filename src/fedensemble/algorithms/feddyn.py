"""FedDyn: a linear term in each client's objective makes the optima of all clients agree.

Client:  w_i = local SGD from w on f_i(v) - <h_i, v> + alpha/2 ||v - w||^2;
         h_i <- h_i - alpha (w_i - w).
Server:  h <- h - alpha share mean_S (w_i - w);   w <- mean_S w_i - h / alpha.

share is the weight of S divided by the weight of all clients, M/N with uniform weights.

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
    """Dynamic regularization; h_i is the client's last gradient, h the mean over all clients.

    The algorithm supports partial participation: clients that do not participate keep their h_i,
    and h stays the weighted mean over all N clients. The paper weights all clients equally, which
    is `weighting = "uniform"`.

    Args:
        alpha: strength of the penalty towards the received model. The server steps beyond the mean
            by h / alpha, so that a smaller alpha makes larger steps.
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

    def init_client_state(self, theta: Tensor) -> Tree:
        return {"h": torch.zeros_like(theta)}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        start, h = sent["theta"], memory["h"]
        theta = problem.descend(
            start, lambda theta, gradient: gradient - h + self.alpha * (theta - start)
        )
        return {"theta": theta}, {"h": h - self.alpha * (theta - start)}

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        h = mode["h"] - self.alpha * cohort.share * (uploads["theta"] - mode["theta"])
        return {"theta": uploads["theta"] - h / self.alpha, "h": h}
