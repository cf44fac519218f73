"""Norms whose only use is a ReLU, or a sum that goes to one, found by watching a pass: one kernel can do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core.randomness import KeyedRandomness

_IN_PLACE = {torch.relu_, Tensor.relu_}
RELUS = {F.relu, torch.relu, Tensor.relu, *_IN_PLACE}
SUMS = {torch.add, Tensor.add, Tensor.add_}
OTHER_WAYS = "The model's forward pass takes other ways in training than on trial: use engine 'loop'."
Fate = Literal["", "relu", "sum"]  # of a norm's output: anything, one ReLU, or one sum that goes to one ReLU


class Watch:
    """Looks at what becomes of the outputs of a module's BatchNorms and GroupNorms."""

    def __init__(self) -> None:
        self._norms: list[list[Any]] = []  # of each output: what was made of it, "relu", a sum's list or None
        self._watched: dict[int, tuple[Tensor, list[Any]]] = {}  # by identity, which nobody else has while it is held

    def made(self, out: Tensor) -> None:
        """The next norm gave this."""
        self._norms.append([])
        self._watched[id(out)] = (out, self._norms[-1])

    def used(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A function of torch was called with these, or the module returned them."""
        for value in tree_leaves((args, kwargs)):
            if id(value) in self._watched:
                self._watched[id(value)][1].append("relu" if func in RELUS else None)
                if func in _IN_PLACE or (func in RELUS and (kwargs.get("inplace") or True in args[1:])):
                    del self._watched[id(value)]  # from here on it is the ReLU's output

    def summed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
        """A sum, of which `used` has heard, gave this."""
        pair = summands(args, kwargs)
        if pair is None or pair[0].shape != pair[1].shape:
            return
        uses: list[Any] = []
        for value in pair[:1] if func is Tensor.add_ else pair:  # what is written into must be the norm's own output
            if id(value) in self._watched:
                self._watched[id(value)][1][-1] = uses
        self._watched[id(out)] = (out, uses)

    def found(self) -> tuple[Fate, ...]:
        """What each norm of the pass was given to, and to nothing else; of two in one sum, the first has it."""
        taken: list[list[Any]] = []
        fates: list[Fate] = []
        for uses in self._norms:
            if uses == ["relu"]:
                fates.append("relu")
            elif uses == [["relu"]] and not any(uses[0] is other for other in taken):
                taken.append(uses[0])
                fates.append("sum")
            else:
                fates.append("")
        return tuple(fates)


def summands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The two tensors that a function of `SUMS` adds; None if it does anything else."""
    given = (*args, *(kwargs[name] for name in ("input", "other") if name in kwargs))
    plain = len(given) == 2 and not set(kwargs) - {"input", "other"}
    return (given[0], given[1]) if plain and all(isinstance(value, Tensor) for value in given) else None


class Rectifying(KeyedRandomness):
    """The part of `Folded` that lets norms do what comes after them.

    Args:
        key, rectified, watch: as there.
    """

    def __init__(self, key: Tensor, rectified: Sequence[Fate], watch: Watch | None) -> None:
        super().__init__(key)
        self.rectified, self.watch, self.norms = rectified, watch, 0
        # By the identity of what the module holds, and that itself, so that nothing else gets its identity:
        self.awaited: dict[int, tuple[Tensor, Tensor]] = {}  # images that have had the ReLU which it will ask for
        self.waiting: dict[int, tuple[Tensor, Callable[[Tensor], Tensor]]] = {}  # norms that wait for their summand

    def by_fate(self, x: Tensor, done: Callable[[bool, Tensor | None], Tensor]) -> Tensor:
        """What stands for the pass's next norm of x: `done` is told whether a ReLU is part of it, and what to add."""
        fate = self.rectified[self.norms] if self.norms < len(self.rectified) else ""
        self.norms += 1
        if fate == "sum":
            stands_in = x.detach()
            self.waiting[id(stands_in)] = (stands_in, lambda more: done(True, more))
            return stands_in
        out = done(fate == "relu", None)
        if fate == "relu":
            self.awaited[id(out)] = (out, out)
        if self.watch is not None:
            self.watch.made(out)
        return out

    def add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """A sum, and the ReLU after it, with a norm that waits for it; None if there is no such in it."""
        pair = summands(args, kwargs)
        if pair is None or not any(id(value) in self.waiting for value in pair):
            return None
        norm, more = pair if id(pair[0]) in self.waiting else (pair[1], pair[0])
        out = self.waiting.pop(id(norm))[1](more)
        held = norm if func is Tensor.add_ else out  # what was written into goes on under its own name
        self.awaited[id(held)] = (held, out)
        return held
