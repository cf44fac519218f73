"""What a method's server may use besides messages: the model as a function of many weight vectors, and its own data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from .learner import Learner
from .randomness import KeyedRandomness

Objective = Callable[[Tensor, Tensor], Tensor]  # outputs [B, ..., C] and targets -> a number


class Workshop:
    """The server's place of work; a method that needs one is bound to it.

    Models are evaluated as they are in predictions: without dropout, with the running statistics they have.

    Args:
        learner: the model's structure and the task.
        examples: a few inputs as the model sees them, to try a model on; their values do not matter.
        unlabelled: inputs of the server's own as the model sees them, or None.
    """

    def __init__(self, learner: Learner, examples: Tensor, unlabelled: Tensor | None = None) -> None:
        self.learner, self.examples, self.unlabelled = learner, examples, unlabelled

    def inputs(self, batch_size: int) -> tuple[Tensor, ...]:
        """The server's own inputs in pieces."""
        return () if self.unlabelled is None else torch.split(self.unlabelled, batch_size)

    def outputs(self, theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
        """Outputs of M models [M, P] for the same inputs [B, ...], all at once: [M, B, ..., C]."""
        with torch.no_grad():
            outputs: Tensor = vmap(self._outputs, in_dims=(0, 0, None))(theta, buffers, x.clone())
            return outputs

    def gradient(self, objective: Objective, theta: Tensor, buffers: Tensor, x: Tensor, target: Tensor) -> Tensor:
        """Gradients of M models' objectives on their own inputs [M, B, ...] and targets [M, B, ...], [M, P]."""

        def value(theta: Tensor, buffers: Tensor, x: Tensor, target: Tensor) -> Tensor:
            return objective(self._outputs(theta, buffers, x), target)

        gradient: Tensor = vmap(grad(value))(theta, buffers, x, target)
        return gradient

    def _outputs(self, theta: Tensor, buffers: Tensor, x: Tensor) -> Any:
        learner = self.learner
        tensors = {
            **learner.theta_layout.unflatten(theta), **learner.buffer_layout.unflatten(buffers), **learner.counters
        }  # fmt: skip
        with KeyedRandomness(0):  # its recurrent layers know `vmap`
            return functional_call(learner.eval_model, tensors, (x,))
