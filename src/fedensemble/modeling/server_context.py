"""What a method's server may use besides messages: the model as a function of many weight vectors,
and its own data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil

import torch
from torch import Tensor
from torch.func import grad, vmap

from ..errors import InputError
from .cuda_graphs import GraphedFunction, capture_graph
from .functional_model import FunctionalModel
from .keyed_rng import KeyedRandomness
from .parameter_swap import swap_parameters

Objective = Callable[[Tensor, Tensor], Tensor]  # outputs [B, ..., C] and targets -> a number

# models times inputs in a call: enough to keep the device busy
_ROOM = {"cpu": 1 << 11, "cuda": 1 << 13}


class ServerContext:
    """The server's place of work; a method that needs one is bound to it.

    Models are evaluated as they are in predictions: without dropout, with the running statistics
    they have. On a GPU what is asked for again and again is recorded as CUDA graphs.

    Args:
        learner: the model's structure and the task.
        examples: a few inputs as the model sees them, to try a model on; their values do not
            matter.
        unlabelled: inputs of the server's own as the model sees them, or None.
        clients_per_mode: how many clients the schedule has train a mode in a round, on average,
            where that is known.
    """

    def __init__(
        self,
        learner: FunctionalModel,
        examples: Tensor,
        unlabelled: Tensor | None = None,
        clients_per_mode: float | None = None,
    ) -> None:
        self.learner, self.examples, self.unlabelled = learner, examples, unlabelled
        self.clients_per_mode = clients_per_mode
        self.room = _ROOM.get(learner.device.type, _ROOM["cpu"])
        record = capture_graph if learner.device.type == "cuda" else None
        # Functions of the learner, not methods: graphs would otherwise wait for the garbage
        # collector.
        self.outputs_of = GraphedFunction(partial(_outputs, learner), record)
        self.gradient_of = GraphedFunction(partial(_gradient, learner), record)

    @property
    def notes(self) -> tuple[str, ...]:
        """Why the work is slower than it could be, if it is."""
        reasons = {
            replayed.reason for replayed in (self.outputs_of, self.gradient_of) if replayed.reason
        }
        return tuple(
            f"The server's work runs without CUDA graphs: {reason}" for reason in sorted(reasons)
        )

    def outputs(self, theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
        """Outputs of M models [M, P] for the same inputs [B, ...], all at once: [M, B, ..., C]."""
        with _repeatable():
            return self.outputs_of(theta, buffers, x)

    def gradient(
        self, objective: Objective, theta: Tensor, buffers: Tensor, x: Tensor, target: Tensor
    ) -> Tensor:
        """Gradients of M models' objectives on their own inputs [M, B, ...] and targets [M, B,
        ...], [M, P].

        An objective is a function of what it is given alone: Python may run it only once for each
        shape.
        """
        with _repeatable():
            return self.gradient_of(objective, theta, buffers, x, target)

    def mixture(self, shares: Tensor, theta: Tensor, buffers: Tensor) -> Tensor:
        """Mixtures of what M models [M, P] say of the server's own inputs, by shares [K, M]: [K, n,
        ..., C].

        Models say probabilities in classification. What does not fit into memory at once is tried
        in halves.
        """
        if self.unlabelled is None:
            raise InputError("The server has no inputs of its own; pass x_server to FederatedData.")
        pieces: list[Tensor] = []
        done, total = 0, len(self.unlabelled)
        while done < total:
            # pieces of one size, as far as possible
            size = ceil(total / ceil(total / max(1, self.room // len(theta))))
            x = self.unlabelled[done : done + size]
            try:
                pieces.append(self._mixture(shares, theta, buffers, x))
                done += len(x)
                continue
            except torch.OutOfMemoryError:
                tried = min(self.room, len(theta) * len(x))
                if tried == 1:
                    raise InputError(
                        f"One model and one of the server's inputs do not fit into the memory of "
                        f"{self.learner.device}: use a smaller model or a larger card."
                    ) from None
            self.room = tried // 2  # out here, where the failed try holds no memory any more
            self.outputs_of.known.clear()
            torch.cuda.empty_cache()
        return torch.cat(pieces, 1)

    def _mixture(self, shares: Tensor, theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
        """The mixtures for some inputs, `room` models at a time."""
        parts = []
        models = zip(
            *(torch.split(t, self.room, d) for t, d in ((shares, 1), (theta, 0), (buffers, 0))),
            strict=True,
        )
        for share, some, statistics in models:
            said = self.outputs(some, statistics, x)
            said = said.softmax(-1) if self.learner.task == "classification" else said
            parts.append(torch.einsum("km,m...->k...", share, said))
        return sum(parts[1:], parts[0])


@contextmanager
def _repeatable() -> Iterator[None]:
    """Within it, convolutions add up in the same order each time: a run that goes on must give the
    same bytes.
    """
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def _outputs(learner: FunctionalModel, theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
    """Outputs of M models for the same inputs; a copy of them, for a model may write into its
    inputs.
    """
    with torch.no_grad():
        outputs: Tensor = vmap(partial(_of_one, learner), in_dims=(0, 0, None))(
            theta, buffers, x.clone()
        )
        return outputs


def _gradient(
    learner: FunctionalModel,
    objective: Objective,
    theta: Tensor,
    buffers: Tensor,
    x: Tensor,
    target: Tensor,
) -> Tensor:
    """Gradients of M models' objectives."""

    def value(theta: Tensor, buffers: Tensor, x: Tensor, target: Tensor) -> Tensor:
        return objective(_of_one(learner, theta, buffers, x), target)

    gradient: Tensor = vmap(grad(value))(theta, buffers, x, target)
    return gradient


def _of_one(learner: FunctionalModel, theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
    """Outputs of one model."""
    tensors = {
        **learner.theta_layout.unflatten(theta),
        **learner.buffer_layout.unflatten(buffers),
        **learner.counters,
    }
    # the former's recurrent layers know `vmap`
    with KeyedRandomness(0), swap_parameters(learner.eval_model, tensors):
        outputs: Tensor = learner.eval_model(x)
        return outputs
