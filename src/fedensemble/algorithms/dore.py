"""DORE: DIANA up, and down only the compressed change of the model, with what was lost carried over.

Clients as in DIANA, at w, the copy that server and clients share;   g = h + mean_S d_i, h as in DIANA;
q = -server_lr g + eta e;   r = Q(q) is all that is broadcast;   e <- q - r;   w <- w + beta r, by server and clients.

Reference: Liu, Li, Tang, Yan, "A double residual compression algorithm for efficient distributed learning", AISTATS
2020.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.algorithm import algorithms
from ..core.types import Cohort
from ..errors import InputError
from ..vectors import Tree
from .compressed import GradientDifferences


@algorithms.register("dore")
@dataclass(frozen=True, kw_only=True)
class Dore(GradientDifferences):
    """Compression both ways: DIANA whose server, too, sends only a compressed change.

    "theta" is w, the shared copy; the paper's x = w - server_lr g is never kept. Clients and partial participation as
    in `GradientDifferences`. The server's random numbers come from the round's coin. The prox of a regulariser is left
    out.

    The paper's clients hear every r. One that missed rounds must catch up before it trains: with every r it missed, or
    with the whole model if that is shorter. The simulation counts one r a visit, which is exact with full participation
    and too little otherwise.

    Args:
        beta: share of r that is applied.
        eta: share of what compression lost that is carried over.
    """

    reference = "Liu et al. 2020"
    sends = "encoded difference up, encoded change of the model down"

    # The paper's experiments have beta = eta = 1, but with eta^2 omega > 1 what is carried over grows without bound,
    # and its theorem asks for beta < 1 / (1 + omega) and a small eta. These are stable for ternary blocks of 256, where
    # omega is 7.5.
    beta: float = 0.7
    eta: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta <= 1 or not 0 <= self.eta <= 1:
            raise InputError(f"Dore needs 0 < beta <= 1 and 0 <= eta <= 1; got {self.beta} and {self.eta}.")

    def init_mode(self, theta: Tensor) -> Tree:
        return {"theta": theta, "h": torch.zeros_like(theta), "e": torch.zeros_like(theta)}

    def download_bytes(self, sent: Tree, coin: Tensor) -> int:
        return self.quantiser.bytes(sent["theta"].shape[-1], sent["theta"].element_size())

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        heard = uploads["difference"]
        q = self.eta * mode["e"] - self.server_lr * (mode["h"] + heard)
        said = self.quantiser.compress(q, cohort.uniform(q))
        theta = mode["theta"] + self.beta * said
        return {"theta": theta, "h": self.learned(mode["h"], heard, cohort), "e": q - said}
