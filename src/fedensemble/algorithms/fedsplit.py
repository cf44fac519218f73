"""FedSplit: Peaceman-Rachford splitting; each client reflects, and the server averages.

u = 2 x - z_i;   z_half = prox_{s f_i}(u), the minimum of f_i(z) + ||z - u||^2 / (2 s), by local SGD
from x; z_i <- z_i + 2 (z_half - x);   x <- mean_i z_i.

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
from .all_clients import first_visit, mean_of_all, unvisited


@algorithms.register("fedsplit")
@dataclass(frozen=True, kw_only=True)
class FedSplit(Algorithm):
    """Operator splitting. The prox is as good as local training makes it.

    Local training starts at x, not at u: where nothing moves any more z_half is x, so the optimum
    is a fixed point however few the steps are.

    The paper has all clients take part in every round. In an ensemble a mode never has that, for
    each client trains one mode per round. `average` says what is done instead; with full
    participation both are the paper's method.

    "all": x is the mean of z_i over all clients that were ever seen, and clients upload the change
    of z_i. This updates a random part of the operator's coordinates, as FedDR (Tran Dinh et al.
    2021) does, and converges to the optimum of strongly convex, smooth losses. A round moves the
    model by the share of the clients that report, so that it is slow where that share is small.

    "reporting": x is the mean of z_i over those who report. This is a heuristic and not FedSplit.
    The z_i of a client that missed rounds is about an x that is gone: it is replaced by x - (u -
    z_half) with u and z_half of the last visit, which is x - s grad f_i and what z_i is at the
    optimum. x then moves about the optimum, at a distance that shrinks with s, and in an ensemble
    can be further from it than FedAvg; but the first hundred rounds with few clients per round are
    faster.

    The paper weighs all clients alike, which is `weighting = "uniform"`.

    Args:
        s: step size of the prox; it needs lr < 2 s or so.
        average: the model is the mean over "all" clients (exact), or over those "reporting" (a
            heuristic, faster at first where few clients take part).
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

    def init_memory(self, theta: Tensor) -> Tree:
        if self.average == "all":
            return {"z": theta, "visited": unvisited(theta)}
        return {
            "z": theta,
            "pull": torch.zeros_like(theta),
            "updates": torch.full_like(theta[..., :1], -1),
        }

    def broadcast(self, mode: Tree) -> Tree:
        return mode if self.average == "reporting" else {"theta": mode["theta"]}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        x = sent["theta"]
        if self.average == "all":
            z, half = self._reflect(x, memory["z"], problem)
            return (
                {"change": 2 * (half - x), "first": first_visit(memory)},
                {"z": z, "visited": torch.ones_like(memory["visited"])},
            )
        # no update since but the one this client was part of
        current = sent["updates"] == memory["updates"] + 1
        old = torch.where(current, memory["z"], x - memory["pull"])
        z, half = self._reflect(x, old, problem)
        return {"theta": z}, {"z": z, "pull": 2 * x - old - half, "updates": sent["updates"]}

    def _reflect(self, x: Tensor, z: Tensor, problem: LocalProblem) -> tuple[Tensor, Tensor]:
        """The next z_i, and z_half."""
        u = 2 * x - z
        half = problem.descend(x, lambda at, gradient: gradient + (at - u) / self.s)
        return z + 2 * (half - x), half

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        if self.average == "all":
            return mean_of_all(mode, uploads, cohort)
        return {"theta": uploads["theta"], "updates": mode["updates"] + 1}
