"""An nn.Module as a pure function of a parameter vector, buffers, a batch and a PRNG key.

Engines train many clients and modes with one module. They need its loss and gradient as a function
of the parameters, without state of its own: `FunctionalModel` swaps tensors into the module for one
forward pass, for one client at a time or for many with `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
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
from .factory import ModelFactory, ModelSpec, SeededFactory
from .frozen import check_repeated, check_unchanged, find_frozen, fingerprint, write_counts
from .keyed_rng import KeyedRandomness
from .losses import Loss, class_logits, find_loss, task_of
from .model_checks import (
    check_constants,
    check_layers,
    collect_buffers,
    require_tensor,
    uses_batch_statistics,
)
from .parameter_swap import set_parameters, swap_parameters

# The result of the last `init_params` of a built-in model, unless it is large.
_INITIAL: dict[Hashable, tuple[Tensor, Tensor]] = {}
_MAX_INITIAL_BYTES = 64 << 20

GradientFn = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, tuple[Tensor, Tensor]]
]


class FunctionalModel:
    """A model's structure and loss, without weights; all clients and modes share it.

    The trainable parameters are one vector "theta" [P]. Other floating-point tensors, which
    training may change (running statistics), are a second vector, "buffers" [R]. Frozen parameters,
    such as those of a pretrained body, exist once: `frozen` holds them by name, all modes and
    visits read the same tensors, and they are part of no vector, message or checkpoint.

    A parameter is frozen if it has `requires_grad=False` and each call of the factory gives it the
    same values. With values of its own in each call, such as those of a randomly initialized layer,
    it differs between modes and is one of the buffers, although training does not change it.

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
        template = self.build(0)
        names = find_frozen(template, self.build)
        template = template.to(device)
        self.frozen: Tree = {n: p.detach() for n, p in template.named_parameters() if n in names}
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

    @cached_property
    def frozen_fingerprint(self) -> Tensor:
        """What two processes compare to know whether their frozen parameters are the same."""
        return fingerprint(self.frozen)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the frozen parameters, which exist once."""
        return sum(value.nbytes for value in self.frozen.values())

    @cached_property
    def earlier_buffers(self) -> Layout:
        """The layout of buffers in files of earlier versions, with frozen parameters among them."""
        model = self.training_model
        untrained = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        tensors = [*model.named_buffers(), *untrained]
        return Layout.of({n: t for n, t in tensors if t.is_floating_point()})

    def use_frozen(self, values: Tree) -> None:
        """Replaces frozen parameters, for example by those that a file of modes holds.

        Only before engines or predictions have used the model.
        """
        for name, value in values.items():
            self.frozen[name] = value.to(self.device, self.frozen[name].dtype)
        self.__dict__.pop("frozen_fingerprint", None)
        for module in (self.training_model, self.eval_model, self.dropout_model):
            set_parameters(module, self.frozen)

    def clone_module(self) -> FunctionalModel:
        """The same model with modules of its own, as a second thread needs them.

        The modules are built, not copied, because some modules cannot be copied; their weights do
        not matter.
        """
        other = copy(self)
        other.training_model = self._build_again().train()
        other.eval_model = self._build_again().eval()
        return other

    def _build_again(self) -> nn.Module:
        """A newly built module on the model's device, with the one copy of frozen parameters."""
        module = self.build(0)
        # Before the module goes to the device, which has no room for a second body perhaps.
        set_parameters(module, self.frozen)
        return module.to(self.device)

    def _copy_module(self, template: nn.Module) -> nn.Module:
        """A deep copy of a module, or a newly built one if it cannot be copied.

        Either has the frozen parameters themselves, not copies.
        """
        frozen = (p for n, p in template.named_parameters() if n in self.frozen)
        try:
            return deepcopy(template, {id(parameter): parameter for parameter in frozen})
        except Exception:  # a user's module may raise anything
            return self._build_again()

    def init_params(self, seed: int, modes: int) -> tuple[Tensor, Tensor]:
        """Parameters [K, P] and buffers [K, R] of K new modes; mode k does not depend on K."""
        if not isinstance(self.factory, ModelSpec) or not self.factory.built_in:
            return self._draw_params(seed, modes)
        # The trials of a search start from the same modes. Only the last ones are kept, and callers
        # get copies, because training may write into them.
        key = (self.factory.key, self.device, self.dtype, seed, modes)
        kept = _INITIAL.get(key)
        if kept is None:
            kept = self._draw_params(seed, modes)
            if sum(tensor.nbytes for tensor in kept) > _MAX_INITIAL_BYTES:
                return kept
            _INITIAL.clear()
            _INITIAL[key] = kept
        return kept[0].clone(), kept[1].clone()

    def _draw_params(self, seed: int, modes: int) -> tuple[Tensor, Tensor]:
        thetas, buffers = [], []
        for mode in range(modes):
            model = self.build(prng.torch_seed(prng.key(seed, "initialisation", mode)))
            check_repeated(self.frozen, model)
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
            writes = write_counts(self.frozen)
            tensors = {**self.theta_layout.unflatten(theta), **buffers, **others, **self.frozen}
            with swap_parameters(self.training_model, tensors):
                with KeyedRandomness(key):
                    outputs = require_tensor(self.training_model(x))
                mask = weight.to(outputs.dtype)
                value = (self.loss(outputs, y) * mask).sum() / mask.sum().clamp(min=1)
                # A gradient is taken here, while the parameters are still swapped in, because
                # activation checkpointing runs the module again for it.
                result = inside(value)
            check_constants(self.constant_names, others, tensors)
            check_unchanged(self.frozen, writes, tensors)
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
            **self.constants,
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
            **self.constants,
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
            **self.constants,
        }
        with torch.no_grad(), swap_parameters(self.eval_model, tensors):
            return self.loss(require_tensor(self.eval_model(x)), y)

    @property
    def constants(self) -> Tree:
        """What all modes have in common: frozen parameters and buffers of other dtypes."""
        return {**self.non_float_buffers, **self.frozen}

    def _untrained(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        """Named tensors of a module that are neither trained nor frozen: buffers.

        Parameters that are not trained, but differ between modes, are among them.
        """
        own = [
            (n, p.detach())
            for n, p in model.named_parameters()
            if not p.requires_grad and n not in self.frozen
        ]
        return [*model.named_buffers(), *own]


# BatchNorm layers whose forward pass increments num_batches_tracked and does not read it.
_WITH_COUNTER = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
