"""FedAvgM: FedAvg with momentum on the server.

D = sum_i p_i (w_i - w) / sum_i p_i;   v <- beta v + D;   w <- w + server_lr v.

Reference: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated
visual classification", 2019.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.algorithm import algorithms
from ..core.types import Cohort
from ..errors import InputError
from ..flat_params import Tree
from .fedavg import FedAvg
from .server_rate import ServerRate


@algorithms.register("fedavgm")
@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerRate, FedAvg):
    """FedAvg with server momentum; with beta = 0 and server_lr = 1 it is FedAvg.

    Under partial participation the mean change is taken over the clients that report.

    Args:
        beta: fraction of the velocity that is kept from one round to the next.
        server_lr: step size of the server along the velocity. Over all later rounds, a change of
            one round moves the model by server_lr / (1 - beta) times itself. The paper has
            server_lr = 1, which is ten times the change for beta = 0.9.
    """

    reference = "Hsu et al. 2019"

    beta: float = 0.9
    server_lr: float = 0.1  # 1 - beta: over all rounds, the model moves by the change itself

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta < 1:
            raise InputError(f"FedAvgM needs 0 <= beta < 1; got {self.beta}.")

    def init_mode(self, theta: Tensor) -> Tree:
        return {"theta": theta, "velocity": torch.zeros_like(theta)}

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        velocity = self.beta * mode["velocity"] + uploads["theta"] - mode["theta"]
        return {"theta": mode["theta"] + self.server_rate(cohort) * velocity, "velocity": velocity}
