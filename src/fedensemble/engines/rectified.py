"""BatchNorms whose only use is a ReLU: found by watching one pass of a module, so that one kernel can do both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

_IN_PLACE = {torch.relu_, Tensor.relu_}
RELUS = {F.relu, torch.relu, Tensor.relu, *_IN_PLACE}


class Watch:
    """Looks at what becomes of the outputs of a module's BatchNorms."""

    def __init__(self) -> None:
        self._uses: list[list[bool]] = []  # of each output: whether they were a ReLU
        self._watched: dict[int, tuple[Tensor, list[bool]]] = {}  # by identity, which nobody else has while it is held

    def made(self, out: Tensor) -> None:
        """The next BatchNorm gave this."""
        self._uses.append([])
        self._watched[id(out)] = (out, self._uses[-1])

    def used(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A function of torch was called with these, or the module returned them."""
        for value in tree_leaves((args, kwargs)):
            if id(value) in self._watched:
                self._watched[id(value)][1].append(func in RELUS)
                if func in _IN_PLACE or (func in RELUS and (kwargs.get("inplace") or True in args[1:])):
                    del self._watched[id(value)]  # from here on it is the ReLU's output

    def found(self) -> tuple[bool, ...]:
        """For each BatchNorm of the pass, whether it was given to one ReLU and to nobody else."""
        return tuple(uses == [True] for uses in self._uses)
