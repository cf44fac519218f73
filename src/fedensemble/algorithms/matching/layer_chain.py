"""The chain of layers with hidden units that a model consists of, found by running it once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...modeling.functional_model import FunctionalModel
from ...runtime.torch_compat import norm_layers

_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Layer:
    """A layer of the chain, with the names of its parameters in the model.

    Args:
        name: of the module in the model.
        width: number of units; all gates of a recurrent layer's cell belong to one unit.
        weight: the parameter whose second axis runs over the units of the layer before, with one
            or several entries per unit (as pixels of a channel after flattening).
        feeding: parameters whose first axis runs over the units, once or once per gate: `weight`
            and biases.
        recurrent: weights from the layer's units to its own units.
        parameters: all of the layer's parameters, also those without units (an embedding before
            it).
    """

    name: str
    width: int
    weight: str
    feeding: tuple[str, ...]
    recurrent: tuple[str, ...]
    parameters: tuple[str, ...]


def find_layer_chain(
    functional_model: FunctionalModel, examples: Tensor, caller: str
) -> list[Layer]:
    """The model's layers in the order in which they run.

    Args:
        examples: inputs as the model receives them.
        caller: the algorithm, for messages.

    Raises:
        InputError: names the layer that cannot be part of a chain, and why.
    """
    model = functional_model.eval_model
    layout = functional_model.theta_layout
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers: list[Layer] = []
    embeddings: list[str] = []  # parameters that are added to the first layer's
    for path, module in _run_order(model, examples, caller):
        own = {n: names[id(p)] for n, p in module.named_parameters(recurse=False)}
        frozen = [name for name in own.values() if name not in layout.names]
        if frozen:
            why = f"its parameter '{frozen[0]}' is frozen and would not move with its units"
            raise _chain_error(caller, path, module, why)
        if isinstance(module, nn.Embedding):
            if layers:
                raise _chain_error(caller, path, module, "an embedding can only be the first layer")
            embeddings += own.values()
            continue
        first, *others = _layers_of(caller, path, module, own)
        first = replace(first, parameters=(*embeddings, *first.parameters))
        embeddings = []
        if layers and layout.shapes[layout.names.index(first.weight)][1] % layers[-1].width:
            why = f"its inputs are not the units of layer '{layers[-1].name}', which runs before it"
            raise _chain_error(caller, path, module, why)
        layers += [first, *others]
    missed = sorted(set(layout.names) - {name for layer in layers for name in layer.parameters})
    if missed:
        raise InputError(
            f"{caller} cannot match this model: parameter '{missed[0]}' belongs to no layer that "
            "runs by itself."
        )
    return layers


def _run_order(model: nn.Module, examples: Tensor, caller: str) -> list[tuple[str, nn.Module]]:
    """Names and modules that own parameters, in the order in which a forward pass calls them."""
    called: list[tuple[str, nn.Module]] = []

    def make_hook(path: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, outputs: object) -> None:
            if any(other is module for _, other in called):
                raise _chain_error(caller, path, module, "it is used more than once")
            called.append((path, module))

        return hook

    owners = [
        (path, module)
        for path, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    hooks = [module.register_forward_hook(make_hook(path)) for path, module in owners]
    try:
        with torch.no_grad():
            model(examples.clone())
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _layers_of(caller: str, path: str, module: nn.Module, own: dict[str, str]) -> list[Layer]:
    """The layers of one module; a recurrent module may have several.

    Args:
        own: the module's parameters, from their name in the module to that in the model.
    """
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
        if getattr(module, "groups", 1) > 1:
            why = "the channels of a convolution with groups cannot be permuted freely"
            raise _chain_error(caller, path, module, why)
        parameters = tuple(own.values())
        width = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        return [Layer(path, int(width), own["weight"], parameters, (), parameters)]
    if isinstance(module, _RECURRENT):
        if module.bidirectional or module.proj_size:
            why = "only recurrent layers with one direction and without projection are supported"
            raise _chain_error(caller, path, module, why)
        layers = []
        for depth in range(module.num_layers):
            weight, recurrent = own[f"weight_ih_l{depth}"], own[f"weight_hh_l{depth}"]
            biases = tuple(own[n] for n in (f"bias_ih_l{depth}", f"bias_hh_l{depth}") if n in own)
            name = path if module.num_layers == 1 else f"{path}, layer {depth}"
            layers.append(
                Layer(
                    name,
                    module.hidden_size,
                    weight,
                    (weight, *biases),
                    (recurrent,),
                    (weight, recurrent, *biases),
                )
            )
        return layers
    why = "only the units of linear, convolution and recurrent layers can be matched"
    if isinstance(module, norm_layers()):
        why = (
            "its running statistics belong to the units before it, and their averages over clients "
            "cannot be permuted"
        )
    elif isinstance(module, (nn.GroupNorm, nn.LayerNorm)):
        why = "it normalizes over units, so that unused units change the others"
    raise _chain_error(caller, path, module, f"{why}; use a model without it")


def _chain_error(caller: str, path: str, module: nn.Module, why: str) -> InputError:
    return InputError(f"{caller} cannot match layer '{path}' ({type(module).__name__}): {why}.")
