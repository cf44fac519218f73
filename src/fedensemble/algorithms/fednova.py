"""FedNova: averages changes per local step, so that clients with more steps do not count more.

Client:  w_i = local SGD from w with tau_i steps;   a_i = effective number of steps, see below;
         d_i = (w_i - w) / a_i.
Server:  w <- w + server_lr a d,   a = sum_i p_i a_i / sum_i p_i,   d = sum_i p_i d_i / sum_i p_i.

The effective number of steps is the sum of the coefficients with which the gradients of the visit
enter w_i - w, divided by -lr: a_i = tau_i for SGD, and with momentum rho
a_i = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho).

Reference: Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in
heterogeneous federated optimization", NeurIPS 2020.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.algorithm import algorithms
from ..core.optimizer import SGD
from ..core.problem import LocalProblem
from ..core.types import Cohort
from ..flat_params import Tree
from .server_rate import ServerRate


@algorithms.register("fednova")
@dataclass(frozen=True, kw_only=True)
class FedNova(ServerRate):
    """FedAvg that normalizes each client's change by its number of local steps.

    With FedAvg, a client that takes twice as many local steps as another, because it has more
    examples or because the other stops early, pulls the model about twice as far, in addition to
    its weight. The model then minimises another objective than the weighted mean of the clients'
    losses. If all clients take the same number of steps, FedNova is FedAvg.

    The effective number of steps is that of local SGD, with momentum or without. With another
    optimizer, such as Adam, it is the number of steps.

    Args:
        server_lr: step size of the server along the normalized mean change.
    """

    reference = "Wang et al. 2020b"
    sends = "change of the model per step and number of steps up, model down"

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        start = sent["theta"]
        steps = self._effective_steps(torch.as_tensor(problem.counts, dtype=start.dtype))
        change = (problem.descend(start) - start) / steps
        return {"theta": change, "steps": steps.expand_as(start[..., :1])}, {}

    def _effective_steps(self, count: Tensor) -> Tensor:
        """The sum of the coefficients of a visit's gradients, given their number, [..., 1]."""
        rho = self.optimizer.momentum if isinstance(self.optimizer, SGD) else 0.0
        return (count - rho * (1 - rho**count) / (1 - rho)) / (1 - rho)

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        change = self.server_rate(cohort) * uploads["steps"] * uploads["theta"]
        return {"theta": mode["theta"] + change}
