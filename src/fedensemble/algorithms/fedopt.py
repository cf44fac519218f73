"""FedAdagrad, FedAdam and FedYogi: adaptive server optimizers that use the mean change as gradient.

D = sum_i p_i (w_i - w) / sum_i p_i;   m <- beta1 m + (1 - beta1) D;
w <- w + server_lr m / (sqrt(v) + tau), where

    FedAdagrad:  v <- v + D^2
    FedAdam:     v <- beta2 v + (1 - beta2) D^2
    FedYogi:     v <- v - (1 - beta2) D^2 sign(v - D^2)

starting at m = 0 and v = tau^2, without bias correction. (The first version of the paper has m
instead of D in the update of v.)

Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive federated
optimization", ICLR 2021.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.algorithm import algorithms
from ..core.types import Cohort
from ..errors import InputError
from ..flat_params import Tree
from .fedavg import FedAvg
from .server_rate import ServerRate


@dataclass(frozen=True, kw_only=True)
class FedOpt(ServerRate, FedAvg):
    """Base class of the three algorithms.

    Under partial participation D is the mean over the clients that report.

    Args:
        server_lr: learning rate of the server; roughly the size of one server step for a parameter.
        beta1: decay of the mean change m.
        tau: degree of adaptivity; changes much smaller than this are damped.
    """

    reference = "Reddi et al. 2021"

    server_lr: float = 0.03
    beta1: float = 0.9
    tau: float = 1e-3  # the paper's value where it does not tune

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        if not 0 < self.tau < 1e19:  # tau^2 must fit into float32
            raise InputError(f"{owner} needs 0 < tau < 1e19; got {self.tau}.")
        for name in ("beta1", "beta2"):
            if hasattr(self, name) and not 0 <= getattr(self, name) < 1:
                raise InputError(f"{owner} needs 0 <= {name} < 1; got {getattr(self, name)}.")

    def init_mode(self, theta: Tensor) -> Tree:
        return {
            "theta": theta,
            "m": torch.zeros_like(theta),
            "v": torch.zeros_like(theta) + self.tau**2,
        }

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        change = uploads["theta"] - mode["theta"]
        m = self.beta1 * mode["m"] + (1 - self.beta1) * change
        v = self.second_moment(mode["v"], change**2)
        theta = mode["theta"] + self.server_rate(cohort) * m / (torch.sqrt(v) + self.tau)
        return {"theta": theta, "m": m, "v": v}

    @abstractmethod
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v, from the current v and square = D^2."""


@algorithms.register("fedadagrad")
@dataclass(frozen=True, kw_only=True)
class FedAdagrad(FedOpt):
    """FedAvg with Adagrad on the server: parameters with large past changes get smaller steps."""

    server_lr: float = 0.1
    beta1: float = 0.0  # the paper runs FedAdagrad without momentum

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@algorithms.register("fedadam")
@dataclass(frozen=True, kw_only=True)
class FedAdam(FedOpt):
    """FedAvg with Adam on the server.

    Args:
        beta2: decay of the mean square v.
    """

    beta2: float = 0.99

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@algorithms.register("fedyogi")
@dataclass(frozen=True, kw_only=True)
class FedYogi(FedOpt):
    """FedAvg with Yogi on the server: like Adam, but the change of v per round is bounded.

    Args:
        beta2: v changes by (1 - beta2) D^2 per round.
    """

    beta2: float = 0.99

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
