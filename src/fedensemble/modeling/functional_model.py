"""An nn.Module as a pure function of a parameter vector, buffers, a batch and a PRNG key.

Engines train many clients and modes with one module. They need its loss and gradient as a function
of the parameters, without state of its own: `FunctionalModel` swaps tensors into the module for one
forward pass, for one client at a time or for many with `vmap`.
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
from .losses import Loss, class_logits, find_loss, task_of
from .model_checks import (
    check_constants,
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
    """A model's structure and loss, without weights; all clients and modes share it.

    The trainable parameters are one vector "theta" [P]. All other floating-point tensors (running
    statistics, frozen parameters) are a second vector, "buffers" [R].

    Args:
        model: a callable that returns a new nn.Module, freshly initialized.
        loss: "cross_entropy", "bce", "mse" or a callable of outputs and targets.
        targets: a few targets, to distinguish classification from regression.
        device: of the modules and of all vectors.
        dtype: of parameters and buffers, torch.float32 or torch.float64.
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
            raise InputError(f"dtype must be torch.float32 or torch.float64; got {dtype}.")
        self.factory, self.device, self.dtype = model, torch.device(device), dtype
        self.user_loss = loss  # a name or a callable
        self.loss, self.task = find_loss(loss), task_of(loss, targets)
        self._build = SeededFactory(model, dtype)
        template = self.build(0).to(device)
        self.theta_layout = Layout.of(
            {n: p for n, p in template.named_parameters() if p.requires_grad}
        )
        self.buffer_layout = Layout.of(
            {n: t for n, t in self._untrained(template) if t.is_floating_point()}
        )
        norms = {n: m for n, m in template.named_modules() if isinstance(m, norm_layers())}
        # Names of the norm layers' batch counters; True for those that are never read.
        counters = {
            f"{n}.num_batches_tracked".lstrip("."): type(m) in _WITH_COUNTER
            for n, m in norms.items()
        }
        # A counter that is never read stays on the CPU, where incrementing it in each forward pass
        # costs no kernel launch.
        self.non_float_buffers = {
            n: t.cpu().clone() if counters.get(n) else t.clone()
            for n, t in self._untrained(template)
            if not t.is_floating_point()
        }
        self.constant_names = [name for name in self.non_float_buffers if name not in counters]
        if not self.theta_layout.names:
            raise InputError(f"{type(template).__name__} has no trainable parameters.")
        check_layers(template)
        self.has_batch_statistics = any(uses_batch_statistics(m) for m in norms.values())
        self.training_model, self.eval_model = template, self._copy_module(template)
        # For predictions with dropout: dropout in train mode, BatchNorm in eval mode.
        self.dropout_model = self._copy_module(template)
        self.training_model.train()
        self.eval_model.eval()
        self.dropout_model.train()
        for module in self.dropout_model.modules():
            if isinstance(module, batch_norm_layers()):
                module.eval()

    def build(self, seed: int) -> nn.Module:
        """A module initialized from a seed, on the CPU so that it is the same for every device."""
        return self._build(seed)

    def clone_module(self) -> FunctionalModel:
        """The same model with modules of its own, as a second thread needs them.

        The modules are built, not copied, because some modules cannot be copied; their weights do
        not matter.
        """
        other = copy(self)
        other.training_model = self.build(0).to(self.device)
        other.training_model.train()
        other.eval_model = self.build(0).to(self.device)
        other.eval_model.eval()
        return other

    def _copy_module(self, template: nn.Module) -> nn.Module:
        """A deep copy of a module, or a newly built one if it cannot be copied."""
        try:
            return deepcopy(template)
        except Exception:  # a user's module may raise anything
            return self.build(0).to(self.device)

    def init_params(self, seed: int, modes: int) -> tuple[Tensor, Tensor]:
        """Parameters [K, P] and buffers [K, R] of K new modes; mode k does not depend on K."""
        thetas, buffers = [], []
        for mode in range(modes):
            model = self.build(prng.torch_seed(prng.key(seed, "initialisation", mode)))
            theta, own_buffers = self.flatten_module(model)
            thetas.append(theta)
            buffers.append(own_buffers)
        return torch.stack(thetas).to(self.device), torch.stack(buffers).to(self.device, self.dtype)

    def flatten_module(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Parameters [P] and buffers [R] of a module of this structure, as copies."""
        theta = self.theta_layout.flatten(dict(model.named_parameters())).detach()
        return theta, self.buffer_layout.flatten(dict(self._untrained(model))).detach()

    def gradient_function(self, batched: bool) -> GradientFn:
        """A function (theta, buffers, x, y, weight, key) -> (gradient, (loss, new buffers)).

        `weight` [B] is 1 for examples and 0 for padding. If `batched`, every argument has a leading
        dimension of visits.
        """

        def objective(
            theta: Tensor,
            buffers: Tree,
            x: Tensor,
            y: Tensor,
            weight: Tensor,
            key: Tensor,
            *,
            inside: Callable[[Tensor], Tensor] = Tensor.detach,
        ) -> Any:
            """Returns (loss, (inside(loss), new buffers))."""
            # Clones, because BatchNorm increments num_batches_tracked in place.
            others = {name: buffer.clone() for name, buffer in self.non_float_buffers.items()}
            tensors = {**self.theta_layout.unflatten(theta), **buffers, **others}
            with swap_parameters(self.training_model, tensors):
                with KeyedRandomness(key):
                    outputs = require_tensor(self.training_model(x))
                mask = weight.to(outputs.dtype)
                value = (self.loss(outputs, y) * mask).sum() / mask.sum().clamp(min=1)
                # A gradient is taken here, while the parameters are still swapped in, because
                # activation checkpointing runs the module again for it.
                result = inside(value)
            check_constants(self.constant_names, others, tensors)
            return value, (result, collect_buffers(buffers, tensors))

        def single(theta: Tensor, *others: Any) -> Any:
            """As `grad_and_value`, without loading the parts of torch that only `vmap` needs."""
            theta = theta.detach().requires_grad_()
            with torch.enable_grad():
                value, aux = objective(
                    theta, *others, inside=lambda value: torch.autograd.grad(value, theta)[0]
                )
            return aux[0], (value.detach(), aux)

        evaluate = (
            vmap(grad_and_value(objective, has_aux=True), randomness="error") if batched else single
        )

        def gradient(
            theta: Tensor, buffers: Tensor, x: Tensor, y: Tensor, weight: Tensor, key: Tensor
        ) -> Any:
            # Separate tensors, not views of one vector: inside vmap, in-place updates of a view
            # would be lost silently.
            named = {n: b.clone() for n, b in self.buffer_layout.unflatten(buffers).items()}
            grad, (value, (_, named)) = evaluate(theta, named, x, y, weight, key)
            return grad, (value, self.buffer_layout.flatten(named) if named else buffers)

        return gradient

    @cached_property
    def train_mode_model(self) -> nn.Module:
        """A module in train mode for predictions: active dropout, BatchNorm with batch statistics.

        It is built on first use, because only evaluation with `batch_statistics` needs it.
        """
        return self._copy_module(self.dropout_model).train()

    @cached_property
    def mc_dropout_model(self) -> nn.Module:
        """A module for MC-dropout: dropout in train mode, BatchNorm and augmentation in eval mode.

        Augmentation of training data is no part of the model: its layers have a class attribute
        `augments = True`.
        """
        model = self._copy_module(self.dropout_model).train()
        for module in model.modules():
            if isinstance(module, batch_norm_layers()) or getattr(module, "augments", False):
                module.eval()
        return model

    def has_dropout(self, x: Tensor) -> bool:
        """Whether predictions for the inputs depend on dropout masks, if dropout is active."""
        with torch.no_grad(), KeyedRandomness(0) as randomness:
            self.mc_dropout_model(x.clone())
            calls: int = randomness.calls
        return calls > 0

    def outputs_with_dropout(
        self, theta: Tensor, buffers: Tensor, x: Tensor, key: prng.Key
    ) -> Tensor:
        """Outputs of one model [P] as `outputs` returns them, with dropout masks of a key."""
        tensors = {
            **self.theta_layout.unflatten(theta),
            **self.buffer_layout.unflatten(buffers.clone()),
            **self.non_float_buffers,
        }
        model = self.mc_dropout_model
        with torch.no_grad(), swap_parameters(model, tensors), KeyedRandomness(key):
            return class_logits(self.user_loss, model(x))

    def outputs(
        self,
        theta: Tensor,
        buffers: Tensor,
        x: Tensor,
        dropout_key: prng.Key | None = None,
        batch_statistics: bool = False,
    ) -> Tensor:
        """Outputs of one model [P] in eval mode, or with dropout active if a key is given.

        For classification they are one logit per class, [B, ..., C], also for loss "bce".

        With `batch_statistics` all layers are in train mode: BatchNorm normalizes with the
        statistics of the batch.
        """
        tensors = {
            **self.theta_layout.unflatten(theta),
            **self.buffer_layout.unflatten(buffers.clone()),
            **self.non_float_buffers,
        }
        if batch_statistics:
            model = self.train_mode_model
            # Clones, because BatchNorm in train mode increments num_batches_tracked in place.
            tensors |= {n: buffer.clone() for n, buffer in self.non_float_buffers.items()}
        else:
            model = self.eval_model if dropout_key is None else self.dropout_model
        with torch.no_grad(), swap_parameters(model, tensors):
            if dropout_key is None:
                return class_logits(self.user_loss, model(x))
            with KeyedRandomness(dropout_key):
                return class_logits(self.user_loss, model(x))

    def row_losses(self, theta: Tensor, buffers: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss of each example under one model [P] in eval mode, [B]."""
        tensors = {
            **self.theta_layout.unflatten(theta),
            **self.buffer_layout.unflatten(buffers.clone()),
            **self.non_float_buffers,
        }
        with torch.no_grad(), swap_parameters(self.eval_model, tensors):
            return self.loss(require_tensor(self.eval_model(x)), y)

    @staticmethod
    def _untrained(model: nn.Module) -> list[tuple[str, Tensor]]:
        """Named tensors that training steps do not change: buffers and frozen parameters."""
        frozen = [(n, p.detach()) for n, p in model.named_parameters() if not p.requires_grad]
        return [*model.named_buffers(), *frozen]


# BatchNorm layers whose forward pass increments num_batches_tracked and does not read it.
_WITH_COUNTER = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
