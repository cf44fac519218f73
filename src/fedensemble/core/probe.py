"""What a method keeps and sends, found by letting one made-up client take one local step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..flat_params import Tree
from .algorithm import Algorithm
from .optimizer import SGD
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

    def gradient(
        self, step: int, at: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return torch.ones_like(at), (at.sum(-1), buffers)


class _ZeroGradient:
    """The local steps of a client whose gradient is zero."""

    count = 1
    active: Tensor | None = None

    def gradient(
        self, step: int, at: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return torch.zeros_like(at), (torch.zeros_like(at[..., 0]), buffers)


def expected_uploads(algorithm: Algorithm, sent: Tree, buffers: Tensor, coin: Tensor) -> Tree:
    """What new clients that learn nothing would upload for each mode, [K, P]: the names and sizes
    to expect.

    The step is one of plain SGD: weight decay would move even a client that learns nothing.
    """
    one = torch.ones_like(coin)
    key = torch.zeros(len(coin), dtype=torch.int64, device=coin.device)
    problem = LocalProblem(_ZeroGradient(), buffers, SGD(), one[0], one, one, key, coin)
    uploads, _ = algorithm.local_training(sent, algorithm.init_memory(sent["theta"]), problem)
    return uploads


def probe(algorithm: Algorithm, theta: Tensor) -> Messages:
    """The forms of what a method keeps and sends for a model `theta` [P]; the values mean
    nothing.
    """
    mode = algorithm.init_mode(theta)
    sent, memory = algorithm.broadcast(mode), algorithm.init_memory(theta)
    one, key = theta.new_ones(1), torch.zeros((), dtype=torch.int64, device=theta.device)
    # A coin of one reaches any threshold: a round that communicates.
    problem = LocalProblem(
        _OneStep(),
        theta.new_empty(0),
        algorithm.optimizer,
        algorithm.rate(0),
        one,
        one,
        key,
        coin=one,
    )
    uploads, _ = check_local_training_result(
        algorithm, algorithm.local_training(sent, memory, problem)
    )
    return Messages(mode, memory, sent, uploads)


def check_local_training_result(algorithm: Algorithm, returned: object) -> tuple[Tree, Tree]:
    """What `local_training` returned; raises unless that is two dictionaries."""
    parts: list[Any] = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if len(parts) != 2 or not all(isinstance(part, dict) for part in parts):
        raise InputError(
            f"{type(algorithm).__name__}.local_training must return two dictionaries of tensors, what is sent up and "
            "the client's new memory ({} if it keeps none); "
            f"got {', '.join(type(part).__name__ for part in parts) or 'nothing'}."
        )
    return parts[0], parts[1]
