"""Resources of server-side algorithms: the model as a function of many parameter vectors, and data.

FedBE and FedSDD distil an ensemble on the server's unlabelled inputs; PFNM and FedMA inspect
the model's structure.
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
from .functional_model import FunctionalModel
from .graphed_function import GraphedFunction, capture_graph
from .keyed_rng import KeyedRandomness
from .losses import class_logits
from .parameter_swap import swap_parameters

Objective = Callable[[Tensor, Tensor], Tensor]  # outputs [B, ..., C] and targets -> a scalar

# Models times inputs per forward pass: enough to keep the device busy.
_CHUNK_SIZE = {"cpu": 1 << 11, "cuda": 1 << 13}


class ServerContext:
    """The model and the server's data, for algorithms that compute with models on the server.

    Models are evaluated as in predictions: without dropout, and with their own running statistics.
    On a GPU, repeated computations run as CUDA graphs.

    Args:
        functional_model: the model's structure and the task.
        examples: a few inputs as the model receives them, to probe a model with; their values do
            not matter.
        unlabelled: the server's own inputs as the model receives them, or None.
        clients_per_mode: mean number of clients that train a mode per round, or None if unknown.
        training_examples: number of examples of all clients, or None if unknown.
    """

    def __init__(
        self,
        model: FunctionalModel,
        examples: Tensor,
        unlabelled: Tensor | None = None,
        clients_per_mode: float | None = None,
        training_examples: int | None = None,
    ) -> None:
        self.model, self.examples, self.unlabelled = model, examples, unlabelled
        self.clients_per_mode = clients_per_mode
        self.training_examples = training_examples
        self.chunk_size = _CHUNK_SIZE.get(model.device.type, _CHUNK_SIZE["cpu"])
        capture = capture_graph if model.device.type == "cuda" else None
        # Functions of the model, not bound methods: these would make a reference cycle, and the
        # graphs' GPU memory would be held until the garbage collector runs.
        self.graphed_outputs = GraphedFunction(partial(_outputs, model), capture)
        self.graphed_gradient = GraphedFunction(partial(_gradient, model), capture)

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons why the server's computations are slower than they could be."""
        graphed = (self.graphed_outputs, self.graphed_gradient)
        failures = {function.failure for function in graphed if function.failure}
        return tuple(
            f"The server's computations run without CUDA graphs: {failure}"
            for failure in sorted(failures)
        )

    def outputs(self, theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
        """Outputs of M models [M, P] for the same inputs [B, ...], in one pass: [M, B, ..., C]."""
        with _deterministic_cudnn():
            return self.graphed_outputs(theta, buffers, x)

    def gradient(
        self, objective: Objective, theta: Tensor, buffers: Tensor, x: Tensor, target: Tensor
    ) -> Tensor:
        """Gradients [M, P] of an objective for M models, each with its own inputs and targets.

        Args:
            objective: a pure function of its arguments: with CUDA graphs, Python calls it only a
                few times per shape.
            theta, buffers: of the models, [M, P] and [M, R].
            x, target: of each model, [M, B, ...].
        """
        with _deterministic_cudnn():
            return self.graphed_gradient(objective, theta, buffers, x, target)

    def mixture_of_predictions(
        self, weights: Tensor, theta: Tensor, buffers: Tensor, *, logits: bool = False
    ) -> Tensor:
        """K mixtures of M models' predictions for the server's own inputs, [K, n, ..., C].

        Predictions are probabilities in classification and outputs in regression. The models and
        inputs are processed in chunks; when one does not fit into memory, the chunk size is halved.

        Args:
            weights: of the models in each mixture, [K, M].
            theta, buffers: of the models, [M, P] and [M, R].
            logits: mix logits instead of probabilities.
        """
        if self.unlabelled is None:
            raise InputError("The server has no inputs of its own; pass x_server to FederatedData.")
        mixtures: list[Tensor] = []
        done, total = 0, len(self.unlabelled)
        while done < total:
            # Chunks of equal size as far as possible: each size would need a CUDA graph of its own.
            size = ceil(total / ceil(total / max(1, self.chunk_size // len(theta))))
            x = self.unlabelled[done : done + size]
            try:
                mixtures.append(self._mix_predictions(weights, theta, buffers, x, logits))
                done += len(x)
                continue
            except torch.OutOfMemoryError:
                attempted = min(self.chunk_size, len(theta) * len(x))
                if attempted == 1:
                    raise InputError(
                        "One model and one of the server's inputs do not fit into the memory of "
                        f"{self.model.device}: use a smaller model or a larger GPU."
                    ) from None
            # After the handler, because the exception's traceback keeps the failed pass's tensors.
            self.chunk_size = attempted // 2
            self.graphed_outputs.cache.clear()
            torch.cuda.empty_cache()
        return torch.cat(mixtures, 1)

    def _mix_predictions(
        self, weights: Tensor, theta: Tensor, buffers: Tensor, x: Tensor, logits: bool
    ) -> Tensor:
        """The mixtures for some inputs, with `chunk_size` models per forward pass."""
        partial_sums = []
        chunks = zip(
            *(
                torch.split(tensor, self.chunk_size, dim)
                for tensor, dim in ((weights, 1), (theta, 0), (buffers, 0))
            ),
            strict=True,
        )
        for chunk_weights, chunk_theta, chunk_buffers in chunks:
            predictions = self.outputs(chunk_theta, chunk_buffers, x)
            if self.model.task == "classification" and not logits:
                predictions = predictions.softmax(-1)
            partial_sums.append(torch.einsum("km,m...->k...", chunk_weights, predictions))
        return sum(partial_sums[1:], partial_sums[0])


@contextmanager
def _deterministic_cudnn() -> Iterator[None]:
    """Lets cuDNN use only deterministic algorithms: a resumed run must give the same bytes."""
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def _outputs(model: FunctionalModel, theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
    """Outputs of M models for the same inputs."""
    with torch.no_grad():
        # A copy of the inputs, because a model may write to them.
        outputs: Tensor = vmap(partial(_single_outputs, model), in_dims=(0, 0, None))(
            theta, buffers, x.clone()
        )
        return outputs


def _gradient(
    model: FunctionalModel,
    objective: Objective,
    theta: Tensor,
    buffers: Tensor,
    x: Tensor,
    target: Tensor,
) -> Tensor:
    """Gradients of M models' objectives."""

    def evaluate(theta: Tensor, buffers: Tensor, x: Tensor, target: Tensor) -> Tensor:
        return objective(_single_outputs(model, theta, buffers, x), target)

    gradient: Tensor = vmap(grad(evaluate))(theta, buffers, x, target)
    return gradient


def _single_outputs(model: FunctionalModel, theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
    """Outputs of one model; for classification, one logit per class."""
    tensors = {
        **model.theta_layout.unflatten(theta),
        **model.buffer_layout.unflatten(buffers),
        **model.constants,
    }
    # KeyedRandomness is needed for its recurrent layers, which support `vmap`; nothing is drawn.
    with KeyedRandomness(0), swap_parameters(model.eval_model, tensors):
        return class_logits(model.user_loss, model.eval_model(x))
