"""FedPD: clients minimize an augmented Lagrangian; a random draw decides if a round communicates.

From x0_i, the client's copy of the model, and its dual variable l_i:

    x_i = local SGD from x0_i on f_i(x) + <l_i, x - x0_i> + ||x - x0_i||^2 / (2 eta);
    l_i <- l_i + (x_i - x0_i) / eta;   y_i = x_i + eta l_i;
    with probability 1 - p:      x0_i <- mean_i y_i for all clients;
    else, without communication: x0_i <- y_i.

The server and the clients share a random draw (`shared_draw`), so that all of them make the same
decision without a message.

References: Zhang, Hong, Dhople, Yin, Liu, "FedPD: a federated learning framework with adaptivity to
non-iid data", IEEE Transactions on Signal Processing 2021; for average = "all", Wang, Marella,
Anderson, "FedADMM: a federated primal-dual algorithm allowing partial participation", IEEE CDC
2022.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, algorithms
from ..core.problem import LocalProblem
from ..core.types import Cohort
from ..errors import InputError
from ..flat_params import Tree, payload_bytes
from .all_clients import first_visit_flag, init_visited_flag, update_mean_of_all


@algorithms.register("fedpd")
@dataclass(frozen=True, kw_only=True)
class FedPD(Algorithm):
    """Primal-dual federated learning that can skip communication.

    Local training starts at x0_i (in the paper, at the last x_i). With p > 0 clients drift apart in
    rounds without communication.

    In the paper all clients participate in every round. This never holds for a mode of an ensemble,
    because each client trains one mode per round. The option `average` selects what is done
    instead; with full participation and p = 0 both values are the paper's algorithm.

    "all": the model is the mean of y_i over all clients seen so far, and clients upload the change
    of y_i. This is FedADMM (Wang et al. 2022) and converges to the optimum of strongly convex,
    smooth losses. A round moves the model in proportion to the share of clients that report, so
    that training is slow if the share is small. It needs p = 0, because the mean would miss the
    local progress of absent clients in rounds without communication.

    "reporting": the model is the mean of y_i over the clients that report; the others keep l_i.
    This is a heuristic and not FedPD: the model fluctuates around the optimum, at a distance that
    shrinks with eta, and in an ensemble it can be further from it than FedAvg. With few clients per
    round, however, the first hundred rounds are faster. A client continues from its own copy only
    if no round has communicated since its last visit; otherwise it receives the model, even in a
    round without communication. (BatchNorm's statistics are averaged, and counted, in every round.)
    The paper weights all clients equally, which is `weighting = "uniform"`.

    Args:
        eta: penalty parameter; lr must be below about 2 eta.
        p: probability that a round does not communicate; in such a round nothing is uploaded.
        average: the model is the mean over "all" clients (exact), or over the clients "reporting"
            (a heuristic, faster at first if few clients participate).
    """

    reference = "Zhang et al. 2021"
    sends = "model up, model and a count down; nothing with probability p"
    full_participation = True

    eta: float = 2.0
    p: float = 0.0
    average: Literal["all", "reporting"] = "reporting"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eta > 0 or not 0 <= self.p < 1:
            raise InputError(f"FedPD needs eta > 0 and 0 <= p < 1; got {self.eta} and {self.p}.")
        if self.average not in ("all", "reporting"):
            raise InputError(f"FedPD needs average 'all' or 'reporting'; got {self.average!r}.")
        if self.average == "all" and self.p > 0:
            raise InputError(
                "FedPD with average 'all' communicates in every round and needs p = 0; "
                f"got {self.p}. Set p = 0, or use average 'reporting'."
            )

    @property
    def assumes_full_participation(self) -> bool:
        return self.average == "reporting"

    def init_mode(self, theta: Tensor) -> Tree:
        if self.average == "all":
            return {"theta": theta, "seen": torch.zeros_like(theta[..., :1])}
        # "talks": number of rounds in which the mode has communicated
        return {"theta": theta, "talks": torch.zeros_like(theta[..., :1])}

    def init_client_state(self, theta: Tensor) -> Tree:
        if self.average == "all":
            return {
                "dual": torch.zeros_like(theta),
                "own": theta,
                "visited": init_visited_flag(theta),
            }
        return {
            "dual": torch.zeros_like(theta),
            "own": theta,
            "talks": torch.full_like(theta[..., :1], -1),  # the client has never received a model
        }

    def broadcast(self, mode: Tree) -> Tree:
        return mode if self.average == "reporting" else {"theta": mode["theta"]}

    def upload_bytes(self, uploads: Tree, shared_draw: Tensor) -> Tensor:  # type: ignore[override] # no `sent`
        return torch.where(shared_draw >= self.p, payload_bytes(uploads), 0)

    def download_bytes(
        self, sent: Tree, shared_draw: Tensor, memory: Tree | None = None
    ) -> int | Tensor:
        """Bytes of the model; 0 if no round has communicated since the client's last visit."""
        if self.average == "all":
            return payload_bytes(sent)
        if memory is None:
            return torch.where(shared_draw >= self.p, payload_bytes(sent), 0)
        return torch.where(sent["talks"] == memory["talks"], 0, payload_bytes(sent))

    def encode(self, uploads: Tree, shared_draw: Tensor) -> Tree:
        return uploads if bool(shared_draw >= self.p) else {}

    def decode(self, message: Tree, like: Tree, shared_draw: Tensor) -> Tree:
        if bool(shared_draw >= self.p):
            return message
        return {name: torch.zeros_like(value) for name, value in like.items()}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        if self.average == "all":
            dual, own = self._solve(sent["theta"], memory["dual"], problem)
            return (
                {"change": own - memory["own"], "first": first_visit_flag(memory)},
                {"dual": dual, "own": own, "visited": torch.ones_like(memory["visited"])},
            )
        start = torch.where(sent["talks"] == memory["talks"], memory["own"], sent["theta"])
        dual, own = self._solve(start, memory["dual"], problem)
        return {"theta": own}, {"dual": dual, "own": own, "talks": sent["talks"]}

    def _solve(self, start: Tensor, dual: Tensor, problem: LocalProblem) -> tuple[Tensor, Tensor]:
        """The next l_i and y_i, from x0_i = `start` and l_i = `dual`."""
        x = problem.descend(
            start, lambda theta, gradient: gradient + dual + (theta - start) / self.eta
        )
        dual = dual + (x - start) / self.eta
        return dual, x + self.eta * dual

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        if self.average == "all":
            return update_mean_of_all(mode, uploads, cohort)
        communicates = cohort.shared_draw >= self.p
        return {
            "theta": torch.where(communicates, uploads["theta"], mode["theta"]),
            "talks": mode["talks"] + communicates,
        }
