"""Finds out what an algorithm keeps and sends, by one local step of a fake client."""

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
    """Server state of a mode, state of a client, and the messages between them; [P] each."""

    mode: Tree
    memory: Tree
    sent: Tree
    uploads: Tree


class NoRows:
    """The part of `Steps` that joint visits use, for a client with one row and a loss of zero."""

    def row_losses(self, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(theta[..., :1]), torch.ones_like(theta[..., 0, :1])

    def weigh_rows(self, weight: Tensor) -> None:
        """Nothing: there is no row whose gradient could change."""


class _OneStep:
    """One local step with a gradient of ones."""

    count = 1
    active: Tensor | None = None

    def gradient(
        self, step: int, theta: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return torch.ones_like(theta), (theta.sum(-1), buffers)


class _ZeroGradient:
    """One local step with a gradient of zeros."""

    count = 1
    active: Tensor | None = None

    def gradient(
        self, step: int, theta: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return torch.zeros_like(theta), (torch.zeros_like(theta[..., 0]), buffers)


class _JointOneStep(NoRows, _OneStep):
    """The same in a joint visit."""


class _JointZeroGradient(NoRows, _ZeroGradient):
    """The same in a joint visit."""


def expected_uploads(
    algorithm: Algorithm, sent: Tree, buffers: Tensor, shared_draw: Tensor
) -> Tree:
    """The uploads of new clients that learn nothing, one per mode, [K, P].

    They have the names and sizes of real uploads. The step is one of plain SGD, because weight
    decay would change the parameters even with a gradient of zero.
    """
    one = torch.ones_like(shared_draw)
    key = torch.zeros(len(shared_draw), dtype=torch.int64, device=shared_draw.device)
    steps = _JointZeroGradient() if algorithm.joint else _ZeroGradient()
    problem = LocalProblem(steps, buffers, SGD(), one[0], one, one, key, shared_draw)
    uploads, _ = algorithm.local_training(sent, algorithm.init_client_state(sent["theta"]), problem)
    return uploads


def probe(algorithm: Algorithm, theta: Tensor) -> Messages:
    """The names, shapes and dtypes of states and messages for a model `theta` [P].

    The values have no meaning.
    """
    mode = algorithm.init_mode(theta)
    sent, memory = algorithm.broadcast(mode), algorithm.init_client_state(theta)
    one, key = theta.new_ones(1), torch.zeros((), dtype=torch.int64, device=theta.device)
    # Algorithms that communicate only in some rounds compare the shared draw with a threshold. A
    # draw of one exceeds every threshold, so that this round communicates.
    problem = LocalProblem(
        _JointOneStep() if algorithm.joint else _OneStep(),
        theta.new_empty(0),
        algorithm.optimizer,
        algorithm.learning_rate(0),
        one,
        one,
        key,
        shared_draw=one,
    )
    uploads, _ = check_local_training_result(
        algorithm, algorithm.local_training(sent, memory, problem)
    )
    return Messages(mode, memory, sent, uploads)


def check_local_training_result(algorithm: Algorithm, returned: object) -> tuple[Tree, Tree]:
    """The uploads and client state that `local_training` returned; raises unless both are dicts."""
    parts: list[Any] = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if len(parts) != 2 or not all(isinstance(part, dict) for part in parts):
        raise InputError(
            f"{type(algorithm).__name__}.local_training must return two dictionaries of tensors, "
            "the uploads and the new client state ({} if it keeps none); "
            f"got {', '.join(type(part).__name__ for part in parts) or 'nothing'}."
        )
    return parts[0], parts[1]
