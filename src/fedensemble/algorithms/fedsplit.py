"""FedSplit: Peaceman-Rachford splitting; each client reflects, and the server averages.

u = 2 x - z_i;   z_half = prox_{s f_i}(u), the minimum of f_i(z) + ||z - u||^2 / (2 s), by local SGD from x;
z_i <- z_i + 2 (z_half - x);   x <- mean_i z_i.

Reference: Pathak, Wainwright, "FedSplit: an algorithmic framework for fast federated optimization", NeurIPS 2020.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, algorithms
from ..core.problem import LocalProblem
from ..core.types import Cohort
from ..errors import InputError
from ..vectors import Tree


@algorithms.register("fedsplit")
@dataclass(frozen=True, kw_only=True)
class FedSplit(Algorithm):
    """Operator splitting. The prox is as good as local training makes it.

    Local training starts at x, not at u: where nothing moves any more z_half is x, so the optimum is a fixed point
    however few the steps are.

    The paper has all clients take part. Here x is the mean of z_i over those who report. A client that missed rounds
    has a z_i about an x that is gone, from which training can diverge: it takes x - (u - z_half) with u and z_half of
    its last visit in its place, which is x - s grad f_i and what z_i is at the optimum. x then moves about the optimum,
    at a distance that shrinks with s. The paper weighs all clients alike, which is `weighting = "uniform"`.

    Args:
        s: step size of the prox; it needs lr < 2 s or so.
    """

    reference = "Pathak and Wainwright 2020"
    sends = "model up, model and a count down"
    full_participation = True

    s: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.s > 0:
            raise InputError(f"FedSplit needs s > 0; got {self.s}.")

    def init_mode(self, theta: Tensor) -> Tree:
        return {"theta": theta, "updates": torch.zeros_like(theta[..., :1])}

    def init_memory(self, theta: Tensor) -> Tree:
        return {"z": theta, "pull": torch.zeros_like(theta), "updates": torch.full_like(theta[..., :1], -1)}

    def broadcast(self, mode: Tree) -> Tree:
        return mode

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        x = sent["theta"]
        current = sent["updates"] == memory["updates"] + 1  # no update since but the one this client was part of
        z = torch.where(current, memory["z"], x - memory["pull"])
        u = 2 * x - z
        half = problem.descend(x, lambda at, gradient: gradient + (at - u) / self.s)
        z = z + 2 * (half - x)
        return {"theta": z}, {"z": z, "pull": u - half, "updates": sent["updates"]}

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        return {"theta": uploads["theta"], "updates": mode["updates"] + 1}
