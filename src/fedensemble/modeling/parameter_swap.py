"""A module with other tensors in the place of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from ..runtime.torch_compat import module_tensors


class ParamSlot(NamedTuple):
    """Where a module keeps a tensor, and the name that stands for it: the first that leads
    there.
    """

    owner: dict[str, Any]
    attribute: str
    name: str


_KNOWN: WeakKeyDictionary[nn.Module, list[ParamSlot]] = WeakKeyDictionary()


@contextmanager
def swap_parameters(module: nn.Module, tensors: dict[str, Any]) -> Iterator[None]:
    """The module has these for its parameters and buffers, and afterwards its own again; what it
    assigned is in them.

    As torch.func.functional_call, but a part that stands under two names is filled and emptied once
    (there it keeps another's weights), and a gradient can be taken inside: checkpointing runs the
    module again for it.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> import torch
    >>> with swap_parameters(layer, {"weight": torch.full((1, 1), 3.0)}): layer(torch.ones(1)).item()
    3.0
    """
    if module not in _KNOWN:
        _KNOWN[module] = _slots(module)
    slots = _KNOWN[module]
    own, given = (
        [slot.owner[slot.attribute] for slot in slots],
        [tensors[slot.name] for slot in slots],
    )
    try:
        for slot, tensor in zip(slots, given, strict=True):
            slot.owner[slot.attribute] = tensor
        yield
    finally:
        for slot, before in zip(slots, own, strict=True):
            # which a pass may have changed; scripted parts have no `get`
            there = slot.attribute in slot.owner
            tensors[slot.name], slot.owner[slot.attribute] = (
                slot.owner[slot.attribute] if there else None,
                before,
            )


def _slots(module: nn.Module) -> list[ParamSlot]:
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
