"""DORE: DIANA for uploads; downloads are compressed changes of the model, with error feedback.

Client:  as in DIANA, at w, the copy that server and clients share.
Server:  g = h + mean_S d_i, h as in DIANA;   q = -server_lr lr g + eta e;   r = Q(q) is broadcast;
         e <- q - r.
Both:    w <- w + beta r.

Reference: Liu, Li, Tang, Yan, "A double residual compression algorithm for efficient distributed
learning", AISTATS 2020.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.algorithm import algorithms
from ...core.problem import LocalProblem
from ...core.types import Cohort
from ...errors import InputError
from ...flat_params import Tree, payload_bytes
from .compressed_uploads import GradientDifferences


@algorithms.register("dore")
@dataclass(frozen=True, kw_only=True)
class Dore(GradientDifferences):
    """Compression in both directions: DIANA whose server also sends only a compressed change.

    "theta" is w, the shared copy; the paper's x = w - server_lr lr g is not stored. The client side
    and partial participation are those of `GradientDifferences`. The server's random numbers come
    from the shared random draw of the round. The proximal step for a regularizer is left out.

    In the paper every client receives every r. Here a client catches up when it is selected again:
    it receives every r since its last visit, or the whole model if that is shorter, and the whole
    model on its first visit. These bytes are counted. With full participation they are one r per
    visit after the first.

    Args:
        beta: fraction of r that is applied.
        eta: fraction of the compression error that is carried over to the next round.
    """

    reference = "Liu et al. 2020"
    sends = (
        "encoded difference up, encoded changes of the model since the last visit down, "
        "or the model if shorter"
    )

    # The paper's experiments have beta = eta = 1. With the inf-norm |q - Q(q)| <= |q|_inf, so that
    # e stays bounded for every eta <= 1. But eta = 1 amplifies the noise about five times, which
    # the mean over the two or three clients of a mode does not average out. With the 2-norm,
    # eta = 1 diverges. (The bound eta^2 omega < 1 is sufficient, not necessary.)
    beta: float = 0.7
    eta: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta <= 1 or not 0 <= self.eta <= 1:
            raise InputError(
                f"Dore needs 0 < beta <= 1 and 0 <= eta <= 1; got {self.beta} and {self.eta}."
            )

    def init_mode(self, theta: Tensor) -> Tree:
        updates = torch.zeros_like(theta[..., :1])  # number of changes of w so far
        return {
            "theta": theta,
            "gradient": torch.zeros_like(theta),
            "e": torch.zeros_like(theta),
            "updates": updates,
        }

    def init_client_state(self, theta: Tensor) -> Tree:
        # -1: the client has never received w
        return {**super().init_client_state(theta), "updates": torch.full_like(theta[..., :1], -1)}

    def broadcast(self, mode: Tree) -> Tree:
        return {"theta": mode["theta"], "updates": mode["updates"]}

    def download_bytes(
        self, sent: Tree, shared_draw: Tensor, memory: Tree | None = None
    ) -> int | Tensor:
        """A count, and one compressed change per missed update, or the whole model if shorter."""
        theta = sent["theta"]
        count_bytes = sent["updates"].element_size()
        change_bytes = self.codec.bytes(theta.shape[-1], theta.element_size())
        model_bytes = payload_bytes({"theta": theta})
        if memory is None:
            return change_bytes + count_bytes
        missed = (sent["updates"] - memory["updates"]).to(torch.int64)
        changes_bytes = (missed * change_bytes).clamp(max=model_bytes)
        return count_bytes + torch.where(memory["updates"] < 0, model_bytes, changes_bytes)

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        uploads, new_memory = super().local_training(sent, memory, problem)
        return uploads, {**new_memory, "updates": sent["updates"]}

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        h, difference = mode["gradient"], uploads["difference"]
        q = self.eta * mode["e"] - self.server_step_size(cohort) * (h + difference)
        change = self.codec.compress(q, cohort.uniform(q))
        return {
            "theta": mode["theta"] + self.beta * change,
            "gradient": self.update_h(h, difference, cohort),
            "e": q - change,
            "updates": mode["updates"] + 1,
        }
