"""FedPD: each client solves an augmented Lagrangian, and a shared coin says whether the round communicates at all.

From x0_i, the client's copy of the model, and its dual variable l_i:

x_i = local SGD from x0_i on f_i(x) + <l_i, x - x0_i> + ||x - x0_i||^2 / (2 eta);   l_i <- l_i + (x_i - x0_i) / eta;
y_i = x_i + eta l_i;   with probability 1 - p: x0_i <- mean_i y_i for all;   else, without a message: x0_i <- y_i.

Reference: Zhang, Hong, Dhople, Yin, Liu, "FedPD: a federated learning framework with adaptivity to non-iid data", IEEE
Transactions on Signal Processing 2021.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, algorithms
from ..core.problem import LocalProblem
from ..core.types import Cohort
from ..errors import InputError
from ..vectors import Tree, row_bytes


@algorithms.register("fedpd")
@dataclass(frozen=True, kw_only=True)
class FedPD(Algorithm):
    """Primal-dual federated learning that can skip communication.

    Local training starts at x0_i (the paper starts at the last x_i). With p > 0 clients drift in silent rounds.

    The paper has all clients take part. Here the model is the mean of y_i over those who report; the others keep l_i.
    It then moves about the optimum, at a distance that shrinks with eta; FedDyn is the variant that does not. A client
    goes on from its own copy only if nobody has communicated since; one that was away needs the model even in a silent
    round, which is not counted. (BatchNorm's statistics are averaged, and counted, in every round.) The paper weighs
    all clients alike, which is `weighting = "uniform"`.

    Args:
        eta: penalty parameter; it needs lr < 2 eta or so.
        p: probability that a round does not communicate; in such a round no bytes of the method are counted.
    """

    reference = "Zhang et al. 2020"
    sends = "model up, model and a count down; nothing in a share p of rounds"
    full_participation = True

    eta: float = 2.0
    p: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eta > 0 or not 0 <= self.p < 1:
            raise InputError(f"FedPD needs eta > 0 and 0 <= p < 1; got {self.eta} and {self.p}.")

    def init_mode(self, theta: Tensor) -> Tree:
        return {"theta": theta, "talks": torch.zeros_like(theta[..., :1])}  # how often the mode has communicated

    def init_memory(self, theta: Tensor) -> Tree:
        return {"dual": torch.zeros_like(theta), "own": theta, "talks": torch.full_like(theta[..., :1], -1)}

    def broadcast(self, mode: Tree) -> Tree:
        return mode

    def upload_bytes(self, uploads: Tree, coin: Tensor) -> Tensor:
        return torch.where(coin >= self.p, row_bytes(uploads), 0)

    def download_bytes(self, sent: Tree, coin: Tensor) -> Tensor:
        return torch.where(coin >= self.p, row_bytes(sent), 0)

    def encode(self, uploads: Tree, coin: Tensor) -> Tree:
        return uploads if bool(coin >= self.p) else {}

    def decode(self, message: Tree, like: Tree, coin: Tensor) -> Tree:
        return message if bool(coin >= self.p) else {name: torch.zeros_like(value) for name, value in like.items()}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        start = torch.where(sent["talks"] == memory["talks"], memory["own"], sent["theta"])
        dual = memory["dual"]
        x = problem.descend(start, lambda at, gradient: gradient + dual + (at - start) / self.eta)
        dual = dual + (x - start) / self.eta
        own = x + self.eta * dual
        return {"theta": own}, {"dual": dual, "own": own, "talks": sent["talks"]}

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        talk = cohort.coin >= self.p
        return {"theta": torch.where(talk, uploads["theta"], mode["theta"]), "talks": mode["talks"] + talk}
