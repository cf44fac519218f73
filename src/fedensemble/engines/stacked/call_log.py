"""Where the batch is in each call of a forward pass: the same pass with two batch sizes.

A stacked pass knows parameters [J, *shape] and a batch [J * B, ...], but not which dimension of an
intermediate tensor holds the batch: transformers may have it second, and a class token has none
until it is expanded. `record_calls` runs the module for one visit and records the sizes in every
call of a torch function. A dimension that differs between two batch sizes holds the batch, and so
does an integer, such as the `len(x)` of `token.expand(len(x), -1, -1)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...modeling.functional_model import FunctionalModel
from ...modeling.keyed_rng import KeyedRandomness
from ...modeling.parameter_swap import swap_parameters
from .errors import CALLS_CHANGE, NotStackable
from .stacked_params import FrozenParams

UNCLEAR = -1  # several dimensions differ, or the number of dimensions


class Call(NamedTuple):
    """One call of a torch function: where the batch is in its arguments and results.

    Args:
        function: the function.
        inputs: of each leaf of the arguments (see `leaves`): the dimension of a tensor that holds
            the batch, 0 for an integer that counts examples, None for anything else.
        outputs: the same of each tensor among the results.
    """

    function: Any
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


class _Sizes(NamedTuple):
    """The shapes of tensors and the values of integers in one call."""

    function: Any
    inputs: list[Any]
    outputs: list[Any]


class _CallRecorder(TorchFunctionMode):
    """Records the sizes in each call while active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Sizes] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [_size_of(leaf) for leaf in leaves((args, kwargs or {}))]
        out = func(*args, **(kwargs or {}))
        # An iterator can only be used once, but has the same tensors as `unbind`.
        results = args[0].unbind() if func is Tensor.__iter__ else out
        outputs = [_size_of(leaf) for leaf in leaves(results) if isinstance(leaf, Tensor)]
        self.calls.append(_Sizes(func, inputs, outputs))
        return out


def record_calls(
    model: FunctionalModel, theta: Tensor, buffers: Tensor, x: Tensor, batch: int
) -> tuple[Call, ...]:
    """The calls of a forward pass in train mode.

    Args:
        theta, buffers: of one model, [P] and [R].
        x: more than `batch` examples.
        batch: the smaller of the two batch sizes.
    """
    one, other = (_record_sizes(model, theta, buffers, x[: batch + more]) for more in (0, 1))
    if [call.function for call in one] != [call.function for call in other]:
        raise NotStackable(CALLS_CHANGE)
    return tuple(
        Call(
            a.function,
            tuple(map(_find_batch, a.inputs, b.inputs)),
            tuple(map(_find_batch, a.outputs, b.outputs)),
        )
        for a, b in zip(one, other, strict=True)
    )


def _record_sizes(
    model: FunctionalModel, theta: Tensor, buffers: Tensor, x: Tensor
) -> list[_Sizes]:
    """The sizes in each call of a forward pass of one model, [P], with examples [B, ...]."""
    tensors = {
        **model.theta_layout.unflatten(theta.detach().requires_grad_()),
        **{name: b.clone() for name, b in model.buffer_layout.unflatten(buffers).items()},
        **{name: b.clone() for name, b in model.non_float_buffers.items()},
        **FrozenParams(model.frozen, {}).tensors,
    }
    key = torch.zeros((), dtype=torch.int64, device=x.device)
    recorder = _CallRecorder()
    swapped = swap_parameters(model.training_model, tensors)
    with torch.enable_grad(), swapped, KeyedRandomness(key), recorder:
        model.training_model(x)
    return recorder.calls


def _size_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape)
    return leaf if isinstance(leaf, int) else None


def _find_batch(one: Any, other: Any) -> int | None:
    if one == other:
        return None
    if isinstance(one, int):
        return 0
    differs = [n for n, sizes in enumerate(zip(one, other, strict=False)) if len(set(sizes)) == 2]
    return differs[0] if len(one) == len(other) and len(differs) == 1 else UNCLEAR


def leaves(value: Any) -> Iterator[Any]:
    """Everything in nested tuples, lists, dictionaries and slices."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        yield value
        return
    for part in value:
        yield from leaves(part)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same nested structure with `function` of each leaf, in the order of `leaves`."""
    if isinstance(value, slice):
        return slice(*(map_leaves(function, v) for v in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {key: map_leaves(function, part) for key, part in value.items()}
    if not isinstance(value, (tuple, list)):
        return function(value)
    parts = [map_leaves(function, part) for part in value]
    if isinstance(value, list):
        return parts
    if hasattr(value, "_fields"):  # a namedtuple takes its fields one by one
        return type(value)(*parts)
    # torch.return_types, such as the result of torch.max, take a sequence; torch.Size would only
    # take integers.
    return type(value)(parts) if hasattr(value, "n_fields") else tuple(parts)
