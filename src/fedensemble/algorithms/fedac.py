"""FedAc: accelerated local SGD; clients couple two sequences, and the server averages both.

Each local step of a client with the sequences (w, a) and the learning rate eta = lr is

    d = w / beta + (1 - 1/beta) a;   g = grad f_i(d);
    a <- d - eta g;   w <- (1 - 1/alpha) w + d / alpha - gamma g,

with gamma = max(sqrt(eta / (mu tau)), eta) for tau local steps, and

    coupling I:   alpha = 1 / (gamma mu),              beta = alpha + 1;
    coupling II:  alpha = 3 / (2 gamma mu) - 1/2,      beta = (2 alpha^2 - 1) / (alpha - 1).

Reference: Yuan, Ma, "Federated accelerated stochastic gradient descent", NeurIPS 2020.
"""

from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, algorithms
from ..core.problem import Gradient, LocalProblem
from ..core.types import Cohort
from ..errors import InputError, setting
from ..flat_params import Tree
from ..modeling.server_context import ServerContext

_SMALLEST_MU, _LARGEST_MU = 0.003, 0.3  # the default of mu stays in the range that was measured


@algorithms.register("fedac")
@dataclass(frozen=True, kw_only=True)
class FedAc(Algorithm):
    """Accelerated FedAvg; "theta" is the sequence a, for which the paper's theorems hold.

    In the paper all workers take the same number of steps in every round. Here both sequences are
    averaged over the clients that report, and the coupling of each client follows from its own
    number of local steps.

    How much acceleration is possible depends on how many clients average out the gradient noise:
    with ten clients per mode a small mu trains much faster than FedAvg, with two it fails.
    Therefore the default of mu depends on the number of clients per mode c, and the server sends it
    with the model.

    Args:
        mu: strong convexity that the coupling assumes; the smaller, the longer the steps of w and
            the longer a averages over past steps. None is 1 / c^2 for c clients per mode, at least
            0.003 and at most 0.3: almost no acceleration with two clients per mode or fewer, 0.01
            with ten.
        coupling: "I" or "II"; II has the faster rate for smooth, strongly convex losses with
            gradient noise.
    """

    reference = "Yuan and Ma 2020"
    sends = "2 models up, 2 models down; with mu = None also mu"
    full_participation = True
    plain_sgd = True
    clients_per_mode: ClassVar[float] = 1.0  # set by `bind`, from the schedule

    mu: float | None = None
    coupling: Literal["I", "II"] = "I"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coupling not in ("I", "II"):
            raise InputError(f"FedAc needs coupling 'I' or 'II'; got {self.coupling!r}.")
        if self.mu is not None and not 0 < self.mu * self.lr < 1:  # so that alpha > 1
            raise InputError(f"FedAc needs 0 < mu < 1 / lr; got mu={self.mu}, lr={self.lr}.")

    @property
    def chosen_mu(self) -> float:
        """The value of mu that is used: the option, or the default for the clients per mode."""
        if self.mu is not None:
            return self.mu
        return min(max(self.clients_per_mode**-2, _SMALLEST_MU), _LARGEST_MU, 0.5 / self.lr)

    @property
    def notes(self) -> tuple[str, ...]:
        if self.mu is not None:
            return ()
        return (
            f"FedAc uses mu = {self.chosen_mu:.3g}, for {self.clients_per_mode:.3g} clients per "
            f"mode; set {setting('algorithm.mu')} to change it.",
        )

    def bind(self, context: ServerContext) -> Self:
        if context.clients_per_mode is None:
            return self
        bound = copy(self)
        object.__setattr__(bound, "clients_per_mode", context.clients_per_mode)
        return bound

    def init_mode(self, theta: Tensor) -> Tree:
        return {"theta": theta, "w": theta}

    def broadcast(self, mode: Tree) -> Tree:
        if self.mu is not None:
            return mode
        # The client receives mu instead of computing it: a client of a real fleet does not know
        # the schedule, and runs with different schedules that train together share one algorithm
        # object.
        return {**mode, "mu": torch.full_like(mode["theta"][..., :1], self.chosen_mu)}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        lr = torch.as_tensor(problem.lr, dtype=sent["theta"].dtype, device=sent["theta"].device)
        mu = sent["mu"] if self.mu is None else self.mu
        gamma = torch.maximum(torch.sqrt(lr / (mu * problem.counts)), lr).to(lr.dtype)
        if self.coupling == "I":
            alpha = 1 / (gamma * mu)
            beta = alpha + 1
        else:
            alpha = 1.5 / (gamma * mu) - 0.5
            beta = (2 * alpha**2 - 1) / (alpha - 1)

        def step(state: Tree, gradient: Gradient) -> Tree:
            middle = state["w"] / beta + (1 - 1 / beta) * state["theta"]
            g = problem.optimizer.prepare(middle, gradient(middle))  # clipping and weight decay
            return {
                "theta": middle - lr * g,
                "w": (1 - 1 / alpha) * state["w"] + middle / alpha - gamma * g,
            }

        return problem.iterate({"theta": sent["theta"], "w": sent["w"]}, step), memory

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        return uploads
