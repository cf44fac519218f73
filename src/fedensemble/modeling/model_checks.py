"""Checks of a user's module: of its layers, after each forward pass, and by one training step.

Parameters are trained as one vector and floating-point buffers are averaged over clients. A module
that changes its parameters by itself, keeps other state, or draws random values that have no key
would train, but wrongly or not reproducibly; these checks raise an error instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..flat_params import Tree
from ..runtime.torch_compat import (
    MissingTorchName,
    batch_norm_layers,
    dispatch_mode,
    norm_layers,
    version,
)

if TYPE_CHECKING:
    from .functional_model import FunctionalModel


def check_layers(model: nn.Module) -> None:
    """Raises for layers that no engine can train."""
    for module in model.modules():
        if uses_batch_statistics(module) and module.momentum is None:
            raise InputError(
                "BatchNorm with momentum=None depends on a count of batches, which cannot be "
                "averaged over clients; give it a momentum."
            )
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.max_norm is not None:
            raise InputError(
                f"{type(module).__name__} with max_norm changes its weights in the forward pass, "
                "and only training steps may; remove max_norm, or normalize the layer's output."
            )
        if module.sparse:
            raise InputError(
                f"{type(module).__name__} with sparse=True has sparse gradients, which cannot be "
                "part of a flat gradient vector; remove sparse=True: the results are the same."
            )


def require_tensor(outputs: object) -> Tensor:
    """The outputs of a model; raises unless they are one tensor."""
    if not isinstance(outputs, Tensor):
        raise InputError(
            f"The model must return one tensor, also in training; got {type(outputs).__name__}. "
            "Other outputs cannot be used: remove them, or compute their loss inside the model."
        )
    return outputs


def uses_batch_statistics(module: nn.Module) -> bool:
    """True for BatchNorm, and for InstanceNorm that tracks running statistics."""
    running = isinstance(module, norm_layers()) and bool(module.track_running_stats)
    return running or isinstance(module, batch_norm_layers())


def check_constants(
    names: Iterable[str], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> None:
    """Raises if a forward pass changed a buffer that is not floating-point.

    Args:
        names: of the buffers to check.
        before: clones that the module had in the pass.
        after: what the module has after it; an in-place write shows in the clone's version.
    """
    for name in names:
        if after[name] is not before[name] or version(before[name]):  # a clone has version 0
            raise InputError(
                f"The model changes its buffer '{name}' of {before[name].dtype} in training, but "
                "only floating-point buffers are averaged and saved. Register it as floating "
                "point, such as torch.zeros(()), or remove it."
            )


def collect_buffers(before: Mapping[str, Tensor], after: Mapping[str, Tensor | None]) -> Tree:
    """Floating-point buffers after a forward pass, written in place or assigned."""
    buffers = {}
    for name, old in before.items():
        new = after[name]
        if new is None or new.shape != old.shape:
            changed = "None" if new is None else f"shape {tuple(new.shape)}"
            raise InputError(
                f"The model's buffer '{name}' of shape {tuple(old.shape)} becomes {changed} in "
                "training. Keep state that is not averaged out of buffers."
            )
        buffers[name] = new.detach().to(old.dtype)
    return buffers


def check_training_step(functional_model: FunctionalModel, x: Tensor, y: Tensor) -> None:
    """Takes one training step with a new module, as engine 'loop' does; raises what it raises."""
    # A new module: Python attributes that the forward pass changes stay as they are in this one.
    functional_model = functional_model.clone_module()
    theta, buffers = functional_model.flatten_module(functional_model.training_model)
    before = theta.clone()
    weight = torch.ones(len(x), dtype=torch.bool, device=x.device)
    key = torch.zeros((), dtype=torch.int64, device=x.device)
    loss = functional_model.loss
    functional_model.loss = lambda outputs, y: check_no_reentrant_checkpoint(loss(outputs, y))
    with _forbid_unkeyed_randomness():
        functional_model.gradient_function(batched=False)(theta, buffers, x, y, weight, key)
    if not torch.equal(theta, before):
        raise InputError(
            "The model changes its parameters in the forward pass, and only training steps may."
        )


def check_no_reentrant_checkpoint(value: Tensor) -> Tensor:
    """Returns `value`; raises if reentrant activation checkpointing is in its autograd graph.

    It calls `backward` inside the backward pass, which accumulates gradients in the parameters'
    `.grad` and hides them from torch.autograd.grad.
    """
    visited, pending = set[Any](), [value.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise InputError(
                "torch.utils.checkpoint with use_reentrant=True hides the gradients of the "
                "checkpointed part; pass use_reentrant=False, which torch recommends as well."
            )
        visited.add(node)
        pending += [previous for previous, _ in node.next_functions]
    return value


def _forbid_unkeyed_randomness() -> AbstractContextManager[Any]:
    """A context that raises when an operator draws from torch's generators.

    `KeyedRandomness` sees the torch functions that a module calls. This mode works below autograd
    and sees every operator, also those that activation checkpointing runs in the backward pass.

    If the private class of torch that it needs is missing, nothing is checked: such a model then
    trains, but its runs are not reproducible.
    """
    try:
        base: Any = dispatch_mode()
    except MissingTorchName:
        return nullcontext()

    class ForbidUnkeyedRandomness(base):  # type: ignore[misc]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # With the default, True, torch imports torch._dynamo, which takes a second.
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise InputError(
                    f"The model draws random values with {func.overloadpacket}, which is not "
                    "reproducible across engines. Use nn.Dropout, torch.rand_like, "
                    "torch.randn_like or torch.bernoulli; and inside torch.utils.checkpoint, "
                    "which draws again, fedensemble.activation_checkpoint instead of it."
                )
            return func(*args, **(kwargs or {}))

    return ForbidUnkeyedRandomness()
