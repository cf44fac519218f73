"""FedSplit: Peaceman-Rachford splitting; each client reflects, and the server averages.

Client:  u = 2 x - z_i;   z_half = prox_{s f_i}(u), which minimizes f_i(z) + ||z - u||^2 / (2 s),
         by local SGD from x;   z_i <- z_i + 2 (z_half - x).
Server:  x <- mean_i z_i.

References: Pathak, Wainwright, "FedSplit: an algorithmic framework for fast federated
optimization", NeurIPS 2020; for average = "all", Tran Dinh, Pham, Phan, Nguyen, "FedDR: randomized
Douglas-Rachford splitting algorithms for nonconvex federated composite optimization", NeurIPS 2021.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, algorithms
from ..core.problem import LocalProblem
from ..core.types import Cohort
from ..errors import InputError
from ..flat_params import Tree
from .all_clients import first_visit_flag, init_visited_flag, update_mean_of_all


@algorithms.register("fedsplit")
@dataclass(frozen=True, kw_only=True)
class FedSplit(Algorithm):
    """Operator splitting; local training approximates the proximal operator.

    Local training starts at x, not at u. At the optimum z_half is then x, so that the optimum is a
    fixed point for any number of local steps.

    In the paper all clients participate in every round. This never holds for a mode of an ensemble,
    because each client trains one mode per round. The option `average` selects what is done
    instead; with full participation both values are the paper's algorithm.

    "all": x is the mean of z_i over all clients seen so far, and clients upload the change of z_i.
    Like FedDR (Tran Dinh et al. 2021), this updates a random part of the operator's coordinates per
    round, and it converges to the optimum of strongly convex, smooth losses. A round moves the
    model in proportion to the share of clients that report, so that training is slow if the share
    is small.

    "reporting": x is the mean of z_i over the clients that report. This is a heuristic and not
    FedSplit. The z_i of a client that missed rounds refers to an outdated x. It is replaced by
    x - (u - z_half) with u and z_half of the last visit, which is x - s grad f_i, the value of z_i
    at the optimum. x then fluctuates around the optimum, at a distance that shrinks with s, and in
    an ensemble it can be further from it than FedAvg. With few clients per round, however, the
    first hundred rounds are faster.

    The paper weights all clients equally, which is `weighting = "uniform"`.

    Args:
        s: step size of the proximal operator; lr must be below about 2 s.
        average: the model is the mean over "all" clients (exact), or over the clients "reporting"
            (a heuristic, faster at first if few clients participate).
    """

    reference = "Pathak and Wainwright 2020"
    sends = "model up, model and a count down"
    full_participation = True

    s: float = 1.0
    average: Literal["all", "reporting"] = "reporting"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.s > 0:
            raise InputError(f"FedSplit needs s > 0; got {self.s}.")
        if self.average not in ("all", "reporting"):
            raise InputError(f"FedSplit needs average 'all' or 'reporting'; got {self.average!r}.")

    @property
    def assumes_full_participation(self) -> bool:
        return self.average == "reporting"

    def init_mode(self, theta: Tensor) -> Tree:
        return {
            "theta": theta,
            "seen" if self.average == "all" else "updates": torch.zeros_like(theta[..., :1]),
        }

    def init_client_state(self, theta: Tensor) -> Tree:
        if self.average == "all":
            return {"z": theta, "visited": init_visited_flag(theta)}
        return {
            "z": theta,
            "pull": torch.zeros_like(theta),  # u - z_half of the last visit
            "updates": torch.full_like(theta[..., :1], -1),
        }

    def broadcast(self, mode: Tree) -> Tree:
        return mode if self.average == "reporting" else {"theta": mode["theta"]}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        x = sent["theta"]
        if self.average == "all":
            z, half = self._reflect(x, memory["z"], problem)
            return (
                {"change": 2 * (half - x), "first": first_visit_flag(memory)},
                {"z": z, "visited": torch.ones_like(memory["visited"])},
            )
        # z_i is current if the only update since the last visit is the one it was part of.
        is_current = sent["updates"] == memory["updates"] + 1
        old_z = torch.where(is_current, memory["z"], x - memory["pull"])
        z, half = self._reflect(x, old_z, problem)
        return {"theta": z}, {"z": z, "pull": 2 * x - old_z - half, "updates": sent["updates"]}

    def _reflect(self, x: Tensor, z: Tensor, problem: LocalProblem) -> tuple[Tensor, Tensor]:
        """The next z_i, and z_half, from x and z_i = `z`."""
        u = 2 * x - z
        half = problem.descend(x, lambda theta, gradient: gradient + (theta - u) / self.s)
        return z + 2 * (half - x), half

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        if self.average == "all":
            return update_mean_of_all(mode, uploads, cohort)
        return {"theta": uploads["theta"], "updates": mode["updates"] + 1}
