"""SVGD: modes are particles that descend together and repel each other.

From the modes w_1 .. w_K, of which the set T has clients in this round,

    w_k <- w_k + server_lr / |T| sum_{j in T} [k(w_j, w_k) D_j + repulsion e grad_{w_j} k(w_j, w_k)]
    D_j = sum_i p_i (w_i - w_j) / sum_i p_i,    k(u, v) = exp(-|u - v|^2 / h).

D_j is the change by local training on the mean loss with the prior of `Anchored`. It stands for
e grad log p(w_j | D), where e = lr S / n for S local steps and n examples of all clients. h is the
squared median distance of the modes, divided by log(K + 1). One mode is FedAvg with weight decay.

Reference: Liu, Wang, "Stein variational gradient descent: a general purpose Bayesian inference
algorithm", NeurIPS 2016. Federated, with one client per round: Kassab, Simeone, "Federated
generalized Bayesian learning via distributed Stein variational gradient descent", IEEE Transactions
on Signal Processing 2022.
"""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from ..core.algorithm import algorithms
from ..core.problem import LocalProblem
from ..core.types import Cohort
from ..errors import InputError
from ..flat_params import Tree
from .anchored import Anchored
from .server_rate import ServerRate


@algorithms.register("svgd")
@dataclass(frozen=True, kw_only=True)
class SVGD(ServerRate, Anchored):
    """Stein variational gradient descent: the modes approximate the posterior together.

    Modes attract each other's progress where they are close, and repel each other. With many
    parameters modes are far apart: the kernel is almost the identity, and a mode moves by 1/K of
    its change. Raise `server_lr` up to K then. For loss "mse" and the meaning of `prior_precision`,
    see `Anchored`: here it is 2 s^2 alpha, too, and `repulsion` is 2 s^2.

    Args:
        prior_precision: precision of the prior N(0, 1 / alpha) in the units of the loss.
        anchor: pull each mode to its own start instead of to zero; SVGD needs no anchors.
        target_noise: standard deviation of noise that each mode adds to its targets; SVGD needs
            none.
        repulsion: factor of the repulsive term: the loss of an example is this times its negative
            log-likelihood, 1 for cross-entropy. 0 lets the modes collapse.
        bandwidth: h of the kernel; 0 takes the squared median distance over log(K + 1).
        server_lr: step size of the server.
    """

    reference = "Liu and Wang 2016"
    sends = "model and steps up, model and strength down"

    anchor: bool = False
    repulsion: float = 1.0
    bandwidth: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("repulsion", "bandwidth"):
            if not getattr(self, name) >= 0:
                raise InputError(f"SVGD needs {name} >= 0; got {getattr(self, name)}.")

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        uploads, memory = super().local_training(sent, memory, problem)
        steps = torch.as_tensor(problem.counts, dtype=sent["theta"].dtype)
        return {**uploads, "steps": steps.expand_as(sent["theta"][..., :1])}, memory

    def init_mode(self, theta: Tensor) -> Tree:
        return {**super().init_mode(theta), "before": theta, "steps": theta[..., :1]}

    def broadcast(self, mode: Tree) -> Tree:
        # What the server keeps between the two parts of its step is not sent.
        kept = {name: value for name, value in mode.items() if name not in ("before", "steps")}
        return super().broadcast(kept)

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        return {**mode, **uploads, "before": mode["theta"]}

    def couple(self, modes: Tree, buffers: Tensor, cohort: Cohort) -> tuple[Tree, Tensor]:
        trained = (cohort.count > 0).to(modes["theta"].dtype)  # [K, 1]
        # "before" and "steps" of a mode without clients are of an earlier round.
        theta = torch.where(trained > 0, modes["before"], modes["theta"])
        change = modes["theta"] - theta
        total = trained.sum()
        steps = (modes["steps"] * trained).sum() / total
        # Differences, not products of the Gram matrix: close modes would lose all their digits.
        squared = torch.cdist(theta, theta, compute_mode="donot_use_mm_for_euclid_dist") ** 2
        h = self._squared_bandwidth(squared)
        kernel = torch.exp(-squared / h) * trained.mT  # [k, j], zero for an idle j
        # sum_j of 2 / h k(w_j, w_k) (w_k - w_j), the gradient by w_j
        away = 2 / h * (kernel.sum(1, keepdim=True) * theta - kernel @ theta)
        step = cohort.lr * steps / self.training_examples
        moved = kernel @ change + self.repulsion * step * away
        # A mode without clients stays, as in all algorithms.
        stepped = theta + self.server_rate(cohort) * moved / total
        return {**modes, "theta": torch.where(trained > 0, stepped, theta)}, buffers

    def _squared_bandwidth(self, squared: Tensor) -> Tensor:
        """The bandwidth h, from the squared distances of the modes [K, K]."""
        if self.bandwidth > 0:
            return torch.full_like(squared[0, 0], self.bandwidth)
        pairs = squared[torch.triu(torch.ones_like(squared, dtype=torch.bool), 1)]
        if not len(pairs):
            return torch.ones_like(squared[0, 0])
        median = pairs.median() / log(len(squared) + 1)
        return median.clamp(min=torch.finfo(squared.dtype).tiny)
