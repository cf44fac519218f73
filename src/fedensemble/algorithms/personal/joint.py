"""What algorithms have in common whose clients receive all modes; see `core/visits/joint.py`."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from ...modeling.server_context import ServerContext
from ..fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class JointAlgorithm(FedAvg):
    """An algorithm whose visits have the K modes as one vector [..., K * P]."""

    joint = True

    # parameters P of one mode; 0 if the algorithm is used without a federation, with one mode
    num_parameters = 0

    def bind(self, context: ServerContext) -> Self:
        bound = copy(self)
        object.__setattr__(bound, "num_parameters", context.model.theta_layout.total)
        return bound

    def split(self, theta: Tensor) -> Tensor:
        """The modes of wide vectors [..., K * P], as [..., K, P]."""
        return theta.reshape(*theta.shape[:-1], -1, self.num_parameters or theta.shape[-1])

    def split_statistics(self, buffers: Tensor, theta: Tensor) -> Tensor:
        """Running statistics [..., K * R] like the modes `theta` [..., K, P], as [..., K, R]."""
        modes = theta.shape[-2]
        return buffers.reshape(*buffers.shape[:-1], modes, buffers.shape[-1] // modes)
