"""SCAFFOLD: local SGD with control variates that correct client drift.

Client:  tau steps v <- v - lr (grad f_i(v) - c_i + c) from w to w_i;
         c_i+ = c_i - c + (w - w_i) / (tau lr), option II of the paper.
Server:  w <- w + server_lr mean_S (w_i - w);   c <- c + share mean_S (c_i+ - c_i).

share is the weight of S divided by the weight of all clients, M/N with uniform weights.

Reference: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled
averaging for federated learning", ICML 2020.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.algorithm import algorithms
from ..core.problem import LocalProblem
from ..core.types import Cohort
from ..flat_params import Tree
from .server_rate import ServerRate


@algorithms.register("scaffold")
@dataclass(frozen=True, kw_only=True)
class Scaffold(ServerRate):
    """Local SGD corrected by control variates: c_i on each client, their mean c on the server.

    The algorithm supports partial participation: clients that do not participate keep their c_i,
    and c stays the weighted mean over all N clients. The paper weights all clients equally, which
    is `weighting = "uniform"`.

    Args:
        server_lr: step size of the server along the mean change.
    """

    reference = "Karimireddy et al. 2020"
    sends = "change of model and control variate up, model and control variate down"
    plain_sgd = True

    def init_mode(self, theta: Tensor) -> Tree:
        return {"theta": theta, "c": torch.zeros_like(theta)}

    def init_client_state(self, theta: Tensor) -> Tree:
        return {"c": torch.zeros_like(theta)}

    def broadcast(self, mode: Tree) -> Tree:
        return mode

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        start, shift = sent["theta"], sent["c"] - memory["c"]
        theta = problem.descend(start, lambda theta, gradient: gradient + shift)
        change = (start - theta) / (problem.counts * problem.lr) - sent["c"]
        return {"theta": theta - start, "c": change}, {"c": memory["c"] + change}

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        c = mode["c"] + cohort.share * uploads["c"]
        return {"theta": mode["theta"] + self.server_rate(cohort) * uploads["theta"], "c": c}
