"""Layers that may do what comes after them, found by watching a pass.

A norm whose only use is a ReLU, or a sum that goes to one, does both in one kernel; a convolution
whose only use is max-pooling does it while its outputs are in the cache (on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...modeling.keyed_rng import KeyedRandomness

RELUS = {F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_}
SUMS = {torch.add, Tensor.add, Tensor.add_}
OTHER_WAYS = (
    "The model's forward pass takes other ways in training than on trial: use engine 'loop'."
)
# Of an output: anything; of a norm's, one ReLU, or one sum that goes to one ReLU; of a
# convolution's, one max-pooling,
# with or without a ReLU before it.
Fusion = Literal["", "relu", "sum", "pool"]


@dataclass
class _Use:
    """What an output was given to, and what was done with what came of it."""

    kind: Literal["", "relu", "sum", "pool"]
    then: list[_Use] = field(default_factory=list)

    def leads_to(self, kind: str) -> bool:
        return [use.kind for use in self.then] == [kind]


class Watch:
    """Looks at what becomes of the outputs of a module's norms and convolutions."""

    def __init__(self) -> None:
        self._layers: list[tuple[str, list[_Use]]] = []
        # by identity, which nobody has while it is held
        self._watched: dict[int, tuple[Tensor, list[_Use]]] = {}

    def made(self, out: Tensor, layer: Literal["norm", "convolution"]) -> None:
        """The next layer gave this."""
        self._layers.append((layer, []))
        self._watched[id(out)] = (out, self._layers[-1][1])

    def used(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A function of torch was called with these, or the module returned them."""
        for value in tree_leaves((args, kwargs)):
            if id(value) in self._watched:
                self._watched[id(value)][1].append(_Use("relu" if func in RELUS else ""))

    def pooled(self, x: Tensor) -> None:
        """The function of which `used` has heard was max-pooling of x in squares that do not
        overlap.
        """
        if id(x) in self._watched:
            self._watched[id(x)][1][-1].kind = "pool"

    def gave(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """The function of which `used` has heard gave this."""
        if func in RELUS:
            given = args[0] if args else kwargs["input"]
            if id(given) in self._watched:  # written into, it is from here on the ReLU's output
                self._watched[id(out)] = (out, self._watched[id(given)][1][-1].then)
        pair = summands(args, kwargs) if func in SUMS else None
        if pair is None or pair[0].shape != pair[1].shape:
            return
        use = _Use("sum")
        # what is written into must be the norm's own output
        for value in pair[:1] if func is Tensor.add_ else pair:
            if id(value) in self._watched:
                self._watched[id(value)][1][-1] = use
        self._watched[id(out)] = (out, use.then)

    def found(self) -> tuple[Fusion, ...]:
        """What each layer of the pass was given to, and to nothing else; of two norms in one sum,
        the first has it.
        """
        taken: list[_Use] = []

        def fate(layer: str, uses: list[_Use]) -> Fusion:
            if len(uses) != 1:
                return ""
            (use,) = uses
            if layer == "convolution":
                return (
                    "pool"
                    if use.kind == "pool" or (use.kind == "relu" and use.leads_to("pool"))
                    else ""
                )
            if (
                use.kind == "sum"
                and use.leads_to("relu")
                and not any(use is other for other in taken)
            ):
                taken.append(use)
                return "sum"
            return "relu" if use.kind == "relu" else ""

        return tuple(fate(*layer) for layer in self._layers)


def summands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The two tensors that a function of `SUMS` adds; None if it does anything else."""
    given = (*args, *(kwargs[name] for name in ("input", "other") if name in kwargs))
    plain = len(given) == 2 and not set(kwargs) - {"input", "other"}
    return (
        (given[0], given[1])
        if plain and all(isinstance(value, Tensor) for value in given)
        else None
    )


class Fated(KeyedRandomness):
    """The part of `Folded` that lets layers do what comes after them.

    Args:
        key, fates, watch: as there.
    """

    def __init__(self, key: Tensor, fates: Sequence[Fusion], watch: Watch | None) -> None:
        super().__init__(key)
        self.fates, self.watch, self.met = fates, watch, 0
        # By the identity of what the module holds, and that itself, so that nothing else gets its
        # identity:
        # images that have had the ReLU which it will ask for
        self.awaited: dict[int, tuple[Tensor, Tensor]] = {}
        # norms that wait for their summand
        self.waiting: dict[int, tuple[Tensor, Callable[[Tensor], Tensor]]] = {}
        # convolutions, for the squares' size
        self.pooling: dict[int, tuple[Tensor, Callable[[int], Tensor]]] = {}

    def _next_fate(self) -> Fusion:
        self.met += 1
        return self.fates[self.met - 1] if self.met <= len(self.fates) else ""

    def normed(self, x: Tensor, done: Callable[[bool, Tensor | None], Tensor]) -> Tensor:
        """What stands for the pass's next norm of x: `done` is told whether a ReLU is part of it,
        and what to add.
        """
        fate = self._next_fate()
        if fate == "sum":
            stands_in = x.detach()
            self.waiting[id(stands_in)] = (stands_in, lambda more: done(True, more))
            return stands_in
        out = done(fate == "relu", None)
        if fate == "relu":
            self.awaited[id(out)] = (out, out)
        if self.watch is not None:
            self.watch.made(out, "norm")
        return out

    def convolved(self, like: Callable[[], Tensor], done: Callable[[int | None], Tensor]) -> Tensor:
        """What stands for the pass's next convolution: `done` is told the size of the squares to
        pool, if any.

        Args:
            like: gives a tensor of the outputs' shape, type and device, whatever is in it.
        """
        # which may be off when it is computed
        if self._next_fate() == "pool" and not torch.is_autocast_enabled("cpu"):
            stands_in = like()
            self.pooling[id(stands_in)] = (stands_in, done)
            return stands_in
        out = done(None)
        if self.watch is not None:
            self.watch.made(out, "convolution")
        return out

    def rectify(self, given: Any) -> Tensor | None:
        """The ReLU of a layer's output, if the layer has seen to it or will."""
        if id(given) in self.awaited:
            return self.awaited.pop(id(given))[1]
        if id(given) in self.pooling:
            stands_in, done = self.pooling[id(given)]
            # of the largest: the same, but less
            self.pooling[id(given)] = (stands_in, lambda size: done(size).relu_())
            return stands_in
        return None

    def add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """A sum, and the ReLU after it, with a norm that waits for it; None if there is no such in
        it.
        """
        pair = summands(args, kwargs)
        if pair is None or not any(id(value) in self.waiting for value in pair):
            return None
        norm, more = pair if id(pair[0]) in self.waiting else (pair[1], pair[0])
        out = self.waiting.pop(id(norm))[1](more)
        # what was written into goes on under its own name
        held = norm if func is Tensor.add_ else out
        self.awaited[id(held)] = (held, out)
        return held

    def stands_in(self, value: Any) -> bool:
        """Whether the module holds this in place of something that is not yet computed."""
        return id(value) in self.waiting or id(value) in self.pooling

    @property
    def unmet(self) -> bool:
        """Whether the pass did not do what it did on trial."""
        return bool(
            self.awaited
            or self.waiting
            or self.pooling
            or (self.fates and self.met != len(self.fates))
        )
