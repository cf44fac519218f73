"""Temporarily replaces a module's parameters and buffers by other tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..runtime.torch_compat import module_tensors


class ParamSlot(NamedTuple):
    """Where a submodule keeps one tensor, and the tensor's name in the top-level module.

    A tensor that several submodules share has several slots with the same name, the first one in
    `named_parameters` or `named_buffers`.
    """

    owner: dict[str, Any]
    attribute: str
    name: str


# Slots of each module, found once: modules are swapped thousands of times per round.
_SLOTS: WeakKeyDictionary[nn.Module, list[ParamSlot]] = WeakKeyDictionary()


@contextmanager
def swap_parameters(module: nn.Module, tensors: dict[str, Any]) -> Iterator[None]:
    """Replaces the module's parameters and buffers by `tensors` inside the context.

    On exit the originals are restored, and `tensors` holds whatever the module has assigned to its
    parameters and buffers meanwhile.

    It differs from torch.func.functional_call in two ways. A submodule that has two names is
    swapped and restored once; functional_call leaves other weights in it. And a gradient can be
    taken inside the context, as activation checkpointing needs: it runs the module again during the
    backward pass, which must see the same tensors.

    >>> import torch
    >>> layer = nn.Linear(1, 1, bias=False)
    >>> with swap_parameters(layer, {"weight": torch.full((1, 1), 3.0)}):
    ...     layer(torch.ones(1)).item()
    3.0
    """
    slots = _slots_of(module)
    originals = [slot.owner[slot.attribute] for slot in slots]
    replacements = [tensors[slot.name] for slot in slots]
    try:
        for slot, tensor in zip(slots, replacements, strict=True):
            slot.owner[slot.attribute] = tensor
        yield
    finally:
        for slot, original in zip(slots, originals, strict=True):
            # Not `owner.get`, which the dictionaries of scripted modules do not have.
            present = slot.attribute in slot.owner
            tensors[slot.name] = slot.owner[slot.attribute] if present else None
            slot.owner[slot.attribute] = original


def set_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Gives a module these tensors as its parameters of these names, for good; copies nothing."""
    made: dict[str, nn.Parameter] = {}  # one for all slots of a name
    for slot in _slots_of(module):
        if slot.name in tensors:
            if slot.name not in made:
                made[slot.name] = nn.Parameter(tensors[slot.name], requires_grad=False)
            slot.owner[slot.attribute] = made[slot.name]


def _slots_of(module: nn.Module) -> list[ParamSlot]:
    if module not in _SLOTS:
        _SLOTS[module] = _find_slots(module)
    return _SLOTS[module]


def _find_slots(module: nn.Module) -> list[ParamSlot]:
    """The slots of all parameters and buffers of a module."""
    names = {
        id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    return [
        ParamSlot(owner, attribute, names[id(tensor)])
        for part in module.modules()
        for owner in module_tensors(part)
        for attribute, tensor in owner.items()
        if tensor is not None
    ]
