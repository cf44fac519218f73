"""What a method keeps and sends, found by letting one made-up client take one local step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..vectors import Tree
from .algorithm import Algorithm
from .problem import LocalProblem


class Messages(NamedTuple):
    """One mode's server state, one client's memory, and what travels between them; [P] each."""

    mode: Tree
    memory: Tree
    sent: Tree
    uploads: Tree


class _OneStep:
    """One client, one local step, a gradient of ones."""

    count = 1
    active: Tensor | None = None

    def gradient(self, step: int, at: Tensor, buffers: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return torch.ones_like(at), (at.sum(-1), buffers)


def probe(algorithm: Algorithm, theta: Tensor) -> Messages:
    """The forms of what a method keeps and sends for a model `theta` [P]; the values mean nothing."""
    mode = algorithm.init_mode(theta)
    sent, memory = algorithm.broadcast(mode), algorithm.init_memory(theta)
    one, key = theta.new_ones(1), torch.zeros((), dtype=torch.int64, device=theta.device)
    # A coin of one reaches any threshold: a round that communicates.
    problem = LocalProblem(
        _OneStep(), theta.new_empty(0), algorithm.optimizer, algorithm.rate(0), one, one, key, coin=one
    )
    uploads, _ = algorithm.local_training(sent, memory, problem)
    return Messages(mode, memory, sent, uploads)
