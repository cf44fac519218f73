"""Distillation on the server: a teacher's predictions for unlabelled inputs train a student.

FedBE and FedSDD have different teachers and students; the binding to the server's inputs and the
training of the student are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from ... import prng
from ...core.algorithm import Algorithm, algorithms
from ...core.optimizer import SGD
from ...errors import InputError
from ...modeling.server_context import Objective, ServerContext

_MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class ServerDistillation(Algorithm):
    """An algorithm whose server trains a student on unlabelled inputs, `data.x_server`."""

    distils: ClassVar[bool] = True
    context: ClassVar[ServerContext | None] = None  # set by `bind`
    instead: ClassVar[str] = "fedavg"  # what to use without inputs of the server

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self.context is None else self.context.notes

    def bind(self, context: ServerContext) -> Self:
        if context.unlabelled is None:
            raise InputError(
                f"{type(self).__name__} distils on unlabelled inputs of the server, and there are "
                "none. Pass x_server to FederatedData; in a config, hold back some training "
                "examples with data.server_share = 0.1 or give a file with data.server_file = "
                f"'inputs.npz'. Or use '{self.instead}'."
            )
        bound = copy(self)
        object.__setattr__(bound, "context", context)
        return bound

    def server_inputs(self) -> tuple[ServerContext, Tensor]:
        """The model as a function of many parameter vectors, and the server's inputs."""
        context = self.context
        if context is None or context.unlabelled is None:
            name = algorithms.name_of(type(self)) or type(self).__name__
            raise InputError(
                f"{name} has no server data, because `bind` was not called; a Federation calls it."
            )
        return context, context.unlabelled


def train_students(
    context: ServerContext,
    objective: Objective,
    theta: Tensor,
    buffers: Tensor,
    x: Tensor,
    teacher: Tensor,
    key: Tensor,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: Callable[[int], float],
) -> Iterator[Tensor]:
    """Yields the students [K, P] after each step of SGD with momentum 0.9.

    Running statistics do not change: models are evaluated as in predictions.

    Args:
        context: evaluates the gradients.
        objective: of outputs and teacher, see `ServerContext.gradient`.
        theta, buffers: of the students at the start, [K, P] and [K, R].
        x: inputs [n, ...].
        teacher: predictions of each student's teacher for them, [K, n, ..., C].
        key: one PRNG key per student, [K]; each visits the inputs in its own random order.
        learning_rate: of a step, counted from 0.
    """
    optimizer = SGD(momentum=_MOMENTUM)
    optimizer_state, step = optimizer.init_state(theta), 0
    student_index = torch.arange(len(theta), device=theta.device).unsqueeze(1)
    epoch_index = torch.arange(epochs, device=key.device).unsqueeze(1)
    for order in prng.permutation(prng.fold_in(key, epoch_index), teacher.shape[1]):  # [K, n]
        row_batches = torch.split(order, batch_size, 1)
        target_batches = torch.split(teacher[student_index, order], batch_size, 1)
        for rows, target in zip(row_batches, target_batches, strict=True):
            gradient = context.gradient(objective, theta, buffers, x[rows], target)
            theta, optimizer_state = optimizer.step(
                theta, gradient, optimizer_state, learning_rate(step)
            )
            step += 1
            yield theta


# Cached, because CUDA graphs recognise an objective by its identity.
@cache
def soft_cross_entropy(temperature: float = 1.0) -> Objective:
    """The cross-entropy between a teacher's probabilities and the student's at a temperature.

    It is multiplied by temperature^2, so that gradients have the same scale at every temperature
    (Hinton et al. 2015). The teacher's probabilities are used as they are.
    """

    def objective(outputs: Tensor, teacher: Tensor) -> Tensor:
        loss = -(teacher * (outputs / temperature).log_softmax(-1)).sum(-1).mean()
        return temperature**2 * loss

    def plain(outputs: Tensor, teacher: Tensor) -> Tensor:
        return -(teacher * outputs.log_softmax(-1)).sum(-1).mean()

    return plain if temperature == 1 else objective
