"""A model as a function of a weight vector: its loss and gradient for one client, or for many by
`vmap`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from .. import prng
from ..errors import InputError
from ..flat_params import Layout, Tree
from ..runtime.torch_compat import batch_norm_layers, norm_layers
from .factory import ModelFactory, SeededFactory
from .keyed_rng import KeyedRandomness
from .losses import Loss, find_loss, task_of
from .model_checks import (
    check_counters,
    check_layers,
    collect_buffers,
    require_tensor,
    uses_batch_statistics,
)
from .parameter_swap import swap_parameters

GradientFn = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, tuple[Tensor, Tensor]]
]


class FunctionalModel:
    """What all clients share: the model's structure and the loss, without any weights.

    Weights are a vector "theta" [P] of the trainable parameters; everything else that is floating
    point (running statistics, frozen parameters) is a second vector, "buffers" [R].

    Args:
        model: a callable that returns a new nn.Module, freshly initialised.
        loss: "cross_entropy", "mse" or a callable of outputs and targets.
        targets: a few targets, to tell classification from regression.
    """

    def __init__(
        self,
        model: ModelFactory,
        loss: str | Loss,
        targets: Tensor,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64):
            raise InputError(f"dtype is torch.float32 or torch.float64; got {dtype}.")
        self.factory, self.device, self.dtype = model, torch.device(device), dtype
        self.loss_given = loss
        self.loss, self.task = find_loss(loss), task_of(loss, targets)
        self._make = SeededFactory(model, dtype)
        template = self.build(0).to(device)
        self.theta_layout = Layout.of(
            {n: p for n, p in template.named_parameters() if p.requires_grad}
        )
        self.buffer_layout = Layout.of(
            {n: t for n, t in self._fixed(template) if t.is_floating_point()}
        )
        norms = {n: m for n, m in template.named_modules() if isinstance(m, norm_layers())}
        counts = {
            f"{n}.num_batches_tracked".lstrip("."): type(m) in _COUNTING for n, m in norms.items()
        }
        # those of BatchNorm, which nobody reads, on the CPU: a GPU would be asked for each of them
        self.counters = {
            n: t.cpu().clone() if counts.get(n) else t.clone()
            for n, t in self._fixed(template)
            if not t.is_floating_point()
        }
        self.constants = [name for name in self.counters if name not in counts]
        if not self.theta_layout.names:
            raise InputError(f"{type(template).__name__} has no trainable parameters.")
        check_layers(template)
        self.has_batch_statistics = any(uses_batch_statistics(m) for m in norms.values())
        self.training_model, self.eval_model = template, self._twin(template)
        # dropout active, BatchNorm with its running statistics
        self.dropout_model = self._twin(template)
        self.training_model.train()
        self.eval_model.eval()
        self.dropout_model.train()
        for module in self.dropout_model.modules():
            if isinstance(module, batch_norm_layers()):
                module.eval()

    def build(self, seed: int) -> nn.Module:
        """A model initialised from a seed, on the CPU so that every device starts alike."""
        return self._make(seed)

    def clone_module(self) -> FunctionalModel:
        """The same with another module to train, whatever its weights: not a copy, which a module
        need not allow.
        """
        other = copy(self)
        other.training_model = self.build(0).to(self.device)
        other.training_model.train()
        return other

    def _twin(self, template: nn.Module) -> nn.Module:
        """A copy of a module, or one made anew where it does not allow that."""
        try:
            return deepcopy(template)
        except Exception:  # whatever a module raises
            return self.build(0).to(self.device)

    def initial(self, seed: int, modes: int) -> tuple[Tensor, Tensor]:
        """Weights [K, P] and buffers [K, R] of freshly initialised modes; mode k is the same for
        every K > k.
        """
        thetas, buffers = [], []
        for mode in range(modes):
            model = self.build(prng.torch_seed(prng.key(seed, "initialisation", mode)))
            theta, fixed = self.flatten_module(model)
            thetas.append(theta)
            buffers.append(fixed)
        return torch.stack(thetas).to(self.device), torch.stack(buffers).to(self.device, self.dtype)

    def flatten_module(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Weights [P] and buffers [R] of a model of this structure, in copies."""
        theta = self.theta_layout.flatten(dict(model.named_parameters())).detach()
        return theta, self.buffer_layout.flatten(dict(self._fixed(model))).detach()

    def gradient_function(self, batched: bool) -> GradientFn:
        """A function (theta, buffers, x, y, weight, key) -> (gradient, (loss, new buffers)).

        Batched, every argument has a leading dimension of visits.
        """

        def objective(
            theta: Tensor,
            buffers: Tree,
            x: Tensor,
            y: Tensor,
            weight: Tensor,
            key: Tensor,
            *,
            then: Callable[[Tensor], Tensor] = Tensor.detach,
        ) -> Any:
            # BatchNorm adds 1 in place
            counters = {name: count.clone() for name, count in self.counters.items()}
            tensors = {**self.theta_layout.unflatten(theta), **buffers, **counters}
            with swap_parameters(self.training_model, tensors):
                with KeyedRandomness(key):
                    outputs = require_tensor(self.training_model(x))
                share = weight.to(outputs.dtype)
                value = (self.loss(outputs, y) * share).sum() / share.sum().clamp(min=1)
                last = then(value)  # for which checkpointing runs the module again
            check_counters(self.constants, counters, tensors)
            return value, (last, collect_buffers(buffers, tensors))

        def single(theta: Tensor, *others: Any) -> Any:
            """As `grad_and_value`, without loading what only `vmap` needs."""
            theta = theta.detach().requires_grad_()
            with torch.enable_grad():
                value, more = objective(
                    theta, *others, then=lambda value: torch.autograd.grad(value, theta)[0]
                )
            return more[0], (value.detach(), more)

        evaluate = (
            vmap(grad_and_value(objective, has_aux=True), randomness="error") if batched else single
        )

        def gradient(
            theta: Tensor, buffers: Tensor, x: Tensor, y: Tensor, weight: Tensor, key: Tensor
        ) -> Any:
            # Separate tensors, not views of one: under vmap an update of a view would be lost
            # without a word.
            named = {n: b.clone() for n, b in self.buffer_layout.unflatten(buffers).items()}
            grad, (value, (_, named)) = evaluate(theta, named, x, y, weight, key)
            return grad, (value, self.buffer_layout.flatten(named) if named else buffers)

        return gradient

    @cached_property
    def train_mode_model(self) -> nn.Module:
        """The model in train mode, for predictions: dropout active, BatchNorm with the statistics
        of each batch.
        """
        return self._twin(self.dropout_model).train()

    def outputs(
        self,
        theta: Tensor,
        buffers: Tensor,
        x: Tensor,
        dropout_key: prng.Key | None = None,
        batch_statistics: bool = False,
    ) -> Tensor:
        """Outputs of one model [P] in eval mode, or with dropout active where a key is given.

        With `batch_statistics` the model is in train mode altogether.
        """
        tensors = {
            **self.theta_layout.unflatten(theta),
            **self.buffer_layout.unflatten(buffers.clone()),
            **self.counters,
        }
        if batch_statistics:  # train mode counts batches in place
            model, tensors = (
                self.train_mode_model,
                {**tensors, **{n: c.clone() for n, c in self.counters.items()}},
            )
        else:
            model = self.eval_model if dropout_key is None else self.dropout_model
        with torch.no_grad(), swap_parameters(model, tensors):
            if dropout_key is None:
                return model(x)  # type: ignore[no-any-return]
            with KeyedRandomness(dropout_key):
                return model(x)  # type: ignore[no-any-return]

    @staticmethod
    def _fixed(model: nn.Module) -> list[tuple[str, Tensor]]:
        """Tensors that gradient descent does not move."""
        frozen = [(n, p.detach()) for n, p in model.named_parameters() if not p.requires_grad]
        return [*model.named_buffers(), *frozen]


_COUNTING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
