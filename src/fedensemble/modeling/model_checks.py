"""What a model must not do in training, found in its layers, after each pass, and by one step
before the first.
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
    """Raises for layers that are known not to work, on any engine."""
    for module in model.modules():
        if uses_batch_statistics(module) and module.momentum is None:
            raise InputError(
                "BatchNorm with momentum=None keeps a count that cannot be averaged; give it a momentum."
            )
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.max_norm is not None:
            raise InputError(
                f"{type(module).__name__} with max_norm changes weights in the forward pass, and only training steps "
                "may; leave max_norm out, or normalise what the layer returns."
            )
        if module.sparse:
            raise InputError(
                f"{type(module).__name__} with sparse=True gives sparse gradients, which have no place in a vector of "
                "weights; leave it out: the numbers stay the same."
            )


def require_tensor(outputs: object) -> Tensor:
    """What a model returned; raises unless it is one tensor."""
    if not isinstance(outputs, Tensor):
        raise InputError(
            f"The model must return one tensor, in training, too; got {type(outputs).__name__}. What else it returns "
            "cannot be used: leave it out, or take the loss of it inside the model."
        )
    return outputs


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether a layer takes statistics over a batch: BatchNorm, or InstanceNorm that keeps running
    statistics.
    """
    running = isinstance(module, norm_layers()) and bool(module.track_running_stats)
    return running or isinstance(module, batch_norm_layers())


def check_counters(
    constants: Iterable[str], given: Mapping[str, Tensor], left: Mapping[str, Tensor]
) -> None:
    """Raises if a pass changed a buffer of whole numbers: what it was `given` is not what it
    `left`, or was written.
    """
    for name in constants:
        if left[name] is not given[name] or version(given[name]):  # a clone starts at version 0
            raise InputError(
                f"The model changes its buffer '{name}' of {given[name].dtype} in training, and only floating-point "
                "buffers are averaged and kept. Register it as floats, such as torch.zeros(()), or do without it."
            )


def collect_buffers(given: Mapping[str, Tensor], left: Mapping[str, Tensor | None]) -> Tree:
    """Floating-point buffers after a pass, whether it wrote into them or assigned others."""
    found = {}
    for name, before in given.items():
        after = left[name]
        if after is None or after.shape != before.shape:
            other = "None" if after is None else f"shape {tuple(after.shape)}"
            raise InputError(
                f"The model gives its buffer '{name}' of shape {tuple(before.shape)} another one in training, {other}. "
                "Keep what is not averaged out of buffers."
            )
        found[name] = after.detach().to(before.dtype)
    return found


def try_training(learner: FunctionalModel, x: Tensor, y: Tensor) -> None:
    """One step of another model, as engine 'loop' takes it; raises whatever it raises."""
    learner = learner.clone_module()  # what this one keeps in Python stays as it was
    theta, buffers = learner.flatten_module(learner.training_model)
    before = theta.clone()
    weight = torch.ones(len(x), dtype=torch.bool, device=x.device)
    key = torch.zeros((), dtype=torch.int64, device=x.device)
    loss, learner.loss = learner.loss, lambda outputs, y: check_graph(loss(outputs, y))
    with _forbid_unkeyed_randomness():
        learner.gradient_function(batched=False)(theta, buffers, x, y, weight, key)
    if not torch.equal(theta, before):
        raise InputError(
            "The model changes its parameters in the forward pass, and only training steps may."
        )


def check_graph(value: Tensor) -> Tensor:
    """What is to be derived; raises if it was made by checkpointing that takes gradients on its
    own.
    """
    known, waiting = set[Any](), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise InputError(
                "torch.utils.checkpoint with use_reentrant=True keeps the gradient of what is in it to itself; give it "
                "use_reentrant=False, which torch recommends, too."
            )
        known.add(node)
        waiting += [before for before, _ in node.next_functions]
    return value


def _forbid_unkeyed_randomness() -> AbstractContextManager[Any]:
    """Raises inside where torch's generators are used, also by checkpointing in the backward pass.

    Without the private class of torch that sees every operator nothing is checked: such a model
    then trains, but its runs cannot be repeated.
    """
    try:
        base: Any = dispatch_mode()
    except MissingTorchName:
        return nullcontext()

    class ForbidUnkeyedRandomness(base):  # type: ignore[misc]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # The default is True, for which torch imports torch._dynamo; that takes a second.
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise InputError(
                    f"The model draws random numbers by {func.overloadpacket}, which cannot be "
                    "repeated on every engine. Use nn.Dropout, torch.rand_like, torch.randn_like "
                    "or torch.bernoulli, and none of them inside torch.utils.checkpoint, which "
                    "draws again."
                )
            return func(*args, **(kwargs or {}))

    return ForbidUnkeyedRandomness()
