"""DIANA: clients upload the compressed difference between their gradient and an estimate of it.

Client:  g_i = (w - w_i) / lr after local SGD from w;   d_i = Q(g_i - h_i) is uploaded;
         h_i <- h_i + alpha d_i.
Server:  g = h + mean_S d_i;   h <- h + alpha share mean_S d_i;   v <- beta v + g;
         w <- w - server_lr lr v.

Reference: Mishchenko, Gorbunov, Takac, Richtarik, "Distributed learning with compressed gradient
differences", 2019.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.algorithm import algorithms
from ...core.types import Cohort
from ...errors import InputError
from ...flat_params import Tree
from .compressed_uploads import GradientDifferences


@algorithms.register("diana")
@dataclass(frozen=True, kw_only=True)
class Diana(GradientDifferences):
    """Compressed gradient differences: the noise of Q vanishes as h_i learns the client's gradient.

    The client side and partial participation are those of `GradientDifferences`. The proximal step
    for a regularizer is left out.

    Args:
        beta: momentum of the server.
    """

    reference = "Mishchenko et al. 2019"
    sends = "encoded difference up, model down"

    beta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta < 1:
            raise InputError(f"Diana needs 0 <= beta < 1; got {self.beta}.")

    def init_mode(self, theta: Tensor) -> Tree:
        return {
            "theta": theta,
            "gradient": torch.zeros_like(theta),
            "velocity": torch.zeros_like(theta),
        }

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        h, difference = mode["gradient"], uploads["difference"]
        velocity = self.beta * mode["velocity"] + h + difference
        theta = mode["theta"] - self.server_step_size(cohort) * velocity
        return {
            "theta": theta,
            "gradient": self.update_h(h, difference, cohort),
            "velocity": velocity,
        }
