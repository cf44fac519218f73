"""Ditto: FedAvg, and next to it a personal model per client that is pulled towards the mode.

Client:  v_i <- local SGD from v_i on f_i(v) + lam/2 ||v - w||^2, which stays on the client;
         w_i = local SGD from w, as in FedAvg.
Server:  w <- sum_i p_i w_i / sum_i p_i.

Reference: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through
personalization", ICML 2021.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ...core.algorithm import algorithms
from ...core.problem import LocalProblem
from ...errors import InputError
from ...flat_params import Tree
from ...modeling.server_context import ServerContext
from ..fedavg import FedAvg


@algorithms.register("ditto")
@dataclass(frozen=True, kw_only=True)
class Ditto(FedAvg):
    """FedAvg with a personal model per client and mode, which is never uploaded.

    The modes are those of FedAvg, bit for bit. A visit takes all its local steps twice, once for
    the personal model and once for the mode, on the same minibatches. The personal model of a
    client that trains a mode for the first time starts from the mode.

    Args:
        lam: strength of the pull of the personal model towards the received mode; with 0, personal
            models are trained locally.
    """

    reference = "Li et al. 2021"
    private_state = True
    personal = True

    lam: float = 0.1

    # number of running statistics R; 0 if the algorithm is used without a federation
    num_statistics = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lam >= 0:
            raise InputError(f"Ditto needs lam >= 0; got {self.lam}.")

    def bind(self, context: ServerContext) -> Self:
        bound = copy(self)
        object.__setattr__(bound, "num_statistics", context.model.buffer_layout.total)
        return bound

    def init_client_state(self, theta: Tensor) -> Tree:
        if not self.num_statistics:
            return {"personal": theta}
        # A new client starts with the statistics that it receives, which are not known here.
        statistics = theta.new_zeros(*theta.shape[:-1], self.num_statistics)
        visited = torch.zeros_like(theta[..., :1])
        return {"personal": theta, "statistics": statistics, "visited": visited}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        # The mode is trained last, so that the reported losses are its own.
        memory = self._train_personal(sent, memory, problem)
        return {"theta": problem.descend(sent["theta"])}, memory

    def _train_personal(self, sent: Tree, memory: Tree, problem: LocalProblem) -> Tree:
        """The client state after training the personal model, with its own running statistics."""
        start, received = sent["theta"], problem.buffers
        problem.buffers = self._statistics(received, memory)
        personal = problem.descend(
            memory["personal"], lambda theta, gradient: gradient + self.lam * (theta - start)
        )
        new = {"personal": personal}
        if self.num_statistics:
            new |= {"statistics": problem.buffers, "visited": torch.ones_like(memory["visited"])}
        # What is trained next starts from the statistics that were received.
        problem.buffers = received
        return new

    def personal_model(self, mode: Tree, buffers: Tensor, memory: Tree) -> tuple[Tensor, Tensor]:
        return memory["personal"], self._statistics(buffers, memory)

    def _statistics(self, received: Tensor, memory: Tree) -> Tensor:
        """Running statistics of the personal model, [..., R]."""
        # A probe of the algorithm, see `core/probe.py`, has no running statistics.
        if not received.shape[-1]:
            return received
        return torch.where(memory["visited"] > 0, memory["statistics"], received)
