"""A model as a chain of layers with hidden units, found by watching it run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...modeling.functional_model import FunctionalModel
from ...runtime.torch_compat import norm_layers

_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Layer:
    """A layer of the chain.

    Args:
        name: in the model.
        width: its units; gates of a recurrent layer share one.
        weight: the parameter whose second axis is the layer before, which may come with several
            entries a unit.
        feeding: parameters with a row (or a row a gate) for each unit: `weight` and biases.
        own: weights from its units to its units, in recurrent layers.
        parameters: all that belong to it, also those without units (an embedding before it).
    """

    name: str
    width: int
    weight: str
    feeding: tuple[str, ...]
    own: tuple[str, ...]
    parameters: tuple[str, ...]


def find_chain(learner: FunctionalModel, examples: Tensor, method: str) -> list[Layer]:
    """The model's layers in the order they run.

    Args:
        examples: inputs as the model sees them.
        method: who asks, for messages.

    Raises:
        InputError: naming the layer that does not fit and why.
    """
    model = learner.eval_model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers: list[Layer] = []
    before: list[str] = []  # parameters of embeddings that wait for their layer
    for path, module in _run_order(model, examples, method):
        held = {n: names[id(p)] for n, p in module.named_parameters(recurse=False)}
        lost = [name for name in held.values() if name not in learner.theta_layout.names]
        if lost:
            raise _refusal(
                method,
                path,
                module,
                f"its parameter '{lost[0]}' is frozen and would not move with its units",
            )
        if isinstance(module, nn.Embedding):
            if layers:
                raise _refusal(method, path, module, "an embedding can only stand first")
            before += held.values()
            continue
        made = _layers_of(method, path, module, held)
        first = made[0]
        made[0] = Layer(
            first.name,
            first.width,
            first.weight,
            first.feeding,
            first.own,
            (*before, *first.parameters),
        )
        before = []
        if (
            layers
            and learner.theta_layout.shapes[learner.theta_layout.names.index(first.weight)][1]
            % layers[-1].width
        ):
            raise _refusal(
                method,
                path,
                module,
                f"it does not follow layer '{layers[-1].name}', which runs before it",
            )
        layers += made
    missed = sorted(
        set(learner.theta_layout.names) - {name for layer in layers for name in layer.parameters}
    )
    if missed:
        raise InputError(
            f"{method} cannot match this model: parameter '{missed[0]}' belongs to no layer that runs by itself."
        )
    return layers


def _run_order(model: nn.Module, examples: Tensor, method: str) -> list[tuple[str, nn.Module]]:
    """The modules that own parameters, as they are called."""
    seen: list[tuple[str, nn.Module]] = []

    def note(path: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, outputs: object) -> None:
            if any(other is module for _, other in seen):
                raise _refusal(method, path, module, "it is used more than once")
            seen.append((path, module))

        return hook

    owners = [
        (p, m)
        for p, m in model.named_modules()
        if next(m.parameters(recurse=False), None) is not None
    ]
    hooks = [module.register_forward_hook(note(path)) for path, module in owners]
    try:
        with torch.no_grad():
            model(examples.clone())
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _layers_of(method: str, path: str, module: nn.Module, held: dict[str, str]) -> list[Layer]:
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
        if getattr(module, "groups", 1) > 1:
            raise _refusal(
                method, path, module, "its channels are convolved in groups, which keep their order"
            )
        every = tuple(held.values())
        width = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        return [Layer(path, int(width), held["weight"], every, (), every)]
    if isinstance(module, _RECURRENT):
        if module.bidirectional or module.proj_size:
            raise _refusal(
                method,
                path,
                module,
                "only recurrent layers of one direction without projection are known",
            )
        made = []
        for depth in range(module.num_layers):
            weight, own = held[f"weight_ih_l{depth}"], held[f"weight_hh_l{depth}"]
            biases = tuple(held[n] for n in (f"bias_ih_l{depth}", f"bias_hh_l{depth}") if n in held)
            name = path if module.num_layers == 1 else f"{path}, layer {depth}"
            made.append(
                Layer(
                    name,
                    module.hidden_size,
                    weight,
                    (weight, *biases),
                    (own,),
                    (weight, own, *biases),
                )
            )
        return made
    why = "only linear, convolution and recurrent layers have units that are known how to match"
    if isinstance(module, norm_layers()):
        why = "its running statistics belong to the units before it, and averages of them do not follow a new order"
    elif isinstance(module, (nn.GroupNorm, nn.LayerNorm)):
        why = "it normalises over units, and so does not let unused ones be"
    raise _refusal(method, path, module, f"{why}; use a model without it")


def _refusal(method: str, path: str, module: nn.Module, why: str) -> InputError:
    return InputError(f"{method} cannot match layer '{path}' ({type(module).__name__}): {why}.")
