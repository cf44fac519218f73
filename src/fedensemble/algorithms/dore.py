"""DORE: DIANA up, and down only the compressed change of the model, with what was lost carried
over.

Clients as in DIANA, at w, the copy that server and clients share;   g = h + mean_S d_i, h as in
DIANA; q = -server_lr lr g + eta e;   r = Q(q) is all that is broadcast;   e <- q - r;   w <- w +
beta r, everywhere.

Reference: Liu, Li, Tang, Yan, "A double residual compression algorithm for efficient distributed
learning", AISTATS 2020.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.algorithm import algorithms
from ..core.problem import LocalProblem
from ..core.types import Cohort
from ..errors import InputError
from ..flat_params import Tree, payload_bytes
from .compressed_uploads import GradientDifferences


@algorithms.register("dore")
@dataclass(frozen=True, kw_only=True)
class Dore(GradientDifferences):
    """Compression both ways: DIANA whose server, too, sends only a compressed change.

    "theta" is w, the shared copy; the paper's x = w - server_lr lr g is never kept. Clients and
    partial participation as in `GradientDifferences`. The server's random numbers come from the
    round's coin. The prox of a regulariser is left out.

    The paper's clients hear every r. Here a client catches up when it is next asked: it receives
    every r since its last visit, or the whole model where that is shorter, and the whole model on
    its first visit. This is what is counted; with full participation it is one r per visit after
    the first.

    Args:
        beta: share of r that is applied.
        eta: share of what compression lost that is carried over.
    """

    reference = "Liu et al. 2020"
    sends = "encoded difference up, encoded changes of the model since the last visit down, or the model if shorter"

    # The paper's experiments have beta = eta = 1. With the inf-norm |q - Q(q)| <= |q|_inf, so that
    # e stays bounded for
    # every eta; but eta = 1 multiplies the noise about five times, which the mean over two or three
    # clients of a mode
    # does not average out. With the 2-norm eta = 1 diverges. (The bound eta^2 omega < 1 is
    # sufficient, not necessary.)
    beta: float = 0.7
    eta: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta <= 1 or not 0 <= self.eta <= 1:
            raise InputError(
                f"Dore needs 0 < beta <= 1 and 0 <= eta <= 1; got {self.beta} and {self.eta}."
            )

    def init_mode(self, theta: Tensor) -> Tree:
        updates = torch.zeros_like(theta[..., :1])  # how often w has changed
        return {
            "theta": theta,
            "gradient": torch.zeros_like(theta),
            "e": torch.zeros_like(theta),
            "updates": updates,
        }

    def init_memory(self, theta: Tensor) -> Tree:
        # -1: w is not known yet
        return {**super().init_memory(theta), "updates": torch.full_like(theta[..., :1], -1)}

    def broadcast(self, mode: Tree) -> Tree:
        return {"theta": mode["theta"], "updates": mode["updates"]}

    def download_bytes(self, sent: Tree, coin: Tensor, memory: Tree | None = None) -> int | Tensor:
        """One compressed change for each update since the client's last visit, at most the whole
        model; and a count.
        """
        theta, count = sent["theta"], sent["updates"].element_size()
        change, model = (
            self.quantiser.bytes(theta.shape[-1], theta.element_size()),
            payload_bytes({"theta": theta}),
        )
        if memory is None:
            return change + count
        missed = (sent["updates"] - memory["updates"]).to(torch.int64)
        return count + torch.where(memory["updates"] < 0, model, (missed * change).clamp(max=model))

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        uploads, kept = super().local_training(sent, memory, problem)
        return uploads, {**kept, "updates": sent["updates"]}

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        h, difference = mode["gradient"], uploads["difference"]
        q = self.eta * mode["e"] - self.step_size(cohort) * (h + difference)
        change = self.quantiser.compress(q, cohort.uniform(q))
        return {
            "theta": mode["theta"] + self.beta * change,
            "gradient": self.learned(h, difference, cohort),
            "e": q - change,
            "updates": mode["updates"] + 1,
        }
