"""FedAc: accelerated local SGD; clients couple two sequences, and the server averages both.

Each local step, at a client that keeps (w, a), with rate eta = lr:

    d = w / beta + (1 - 1/beta) a;   g = grad f_i(d);   a <- d - eta g;   w <- (1 - 1/alpha) w + d / alpha - gamma g.

gamma = max(sqrt(eta / (mu tau)), eta) for tau local steps. Coupling I: alpha = 1 / (gamma mu), beta = alpha + 1;
coupling II: alpha = 3 / (2 gamma mu) - 1/2, beta = (2 alpha^2 - 1) / (alpha - 1).

Reference: Yuan, Ma, "Federated accelerated stochastic gradient descent", NeurIPS 2020.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, algorithms
from ..core.problem import Gradient, LocalProblem
from ..core.types import Cohort
from ..errors import InputError
from ..vectors import Tree


@algorithms.register("fedac")
@dataclass(frozen=True, kw_only=True)
class FedAc(Algorithm):
    """Accelerated FedAvg; "theta" is the aggregate sequence a, which the paper's theorems speak of.

    The paper has all workers take the same number of steps in every round. Here both sequences are averaged over the
    clients that report, and each client's coupling is that of its own number of local steps.

    Args:
        mu: strong convexity that the coupling assumes; the smaller, the longer the steps of w and the memory of a.
        coupling: "I" or "II"; II is the one with the faster rate for smooth, strongly convex losses with noise.
    """

    reference = "Yuan and Ma 2020"
    sends = "2 models up, 2 models down"
    full_participation = True
    plain_sgd = True

    mu: float = 0.3
    coupling: Literal["I", "II"] = "I"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coupling not in ("I", "II"):
            raise InputError(f"FedAc needs coupling 'I' or 'II'; got {self.coupling!r}.")
        if not 0 < self.mu * self.lr < 1:  # then alpha > 1
            raise InputError(f"FedAc needs 0 < mu < 1 / lr; got mu={self.mu}, lr={self.lr}.")

    def init_mode(self, theta: Tensor) -> Tree:
        return {"theta": theta, "w": theta}

    def broadcast(self, mode: Tree) -> Tree:
        return mode

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        lr = torch.as_tensor(problem.lr, dtype=sent["theta"].dtype, device=sent["theta"].device)
        gamma = torch.maximum(torch.sqrt(lr / (self.mu * problem.counts)), lr).to(lr.dtype)
        if self.coupling == "I":
            alpha = 1 / (gamma * self.mu)
            beta = alpha + 1
        else:
            alpha = 1.5 / (gamma * self.mu) - 0.5
            beta = (2 * alpha**2 - 1) / (alpha - 1)

        def step(state: Tree, gradient: Gradient) -> Tree:
            middle = state["w"] / beta + (1 - 1 / beta) * state["theta"]
            g = problem.optimizer.prepare(middle, gradient(middle))  # clipping and weight decay
            return {"theta": middle - lr * g, "w": (1 - 1 / alpha) * state["w"] + middle / alpha - gamma * g}

        return problem.iterate(sent, step), memory

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        return uploads
