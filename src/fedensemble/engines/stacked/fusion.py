"""Operator fusion: a norm runs in one kernel with the ReLU, or the addition and ReLU, after it.

`FusionTracer` watches one forward pass and finds the norms whose output goes to a ReLU, or to one
addition that goes to a ReLU, and nowhere else. `FusedNorms` then runs these norms fused.

How a fused pass works: the module still calls the norm, the addition and the ReLU one after
another.

- Fusion "relu": the norm returns the rectified output. When the module passes exactly this tensor
  to a ReLU, the ReLU returns it unchanged.
- Fusion "add_relu": the norm cannot run yet, because the other summand is not known. It returns a
  placeholder. When the module adds something to the placeholder, norm, addition and ReLU run as one
  kernel, and the ReLU that follows returns its input.

A module must not see these intermediate values: they are not the norm's output. Any torch function
other than the expected one raises for a placeholder, a module with forward hooks is never fused
(`check_stackable`), and a pass that ends with unfinished fusions raises. Without these checks a
model that takes another path than the traced one would silently train on wrong values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...flat_params import tensor_leaves

RELUS = {F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_}
ADDITIONS = {torch.add, Tensor.add, Tensor.add_}
Fusion = Literal["", "relu", "add_relu"]


@dataclass
class _Use:
    """One use of a tensor, and the uses of its result."""

    kind: Literal["", "relu", "add"]
    then: list[_Use] = field(default_factory=list)

    def leads_only_to(self, kind: str) -> bool:
        return [use.kind for use in self.then] == [kind]


class FusionTracer:
    """Records what one forward pass does with the outputs of its norms."""

    def __init__(self) -> None:
        # True if parts of the model run again in the backward pass, where norms cannot be counted.
        self.checkpointed = False
        self._norms: list[list[_Use]] = []
        # Tensors are identified by `id`, which is unique only while the tensor is alive: the
        # entries hold a reference so that no other tensor can get the same `id` during the trace.
        self._traced: dict[int, tuple[Tensor, list[_Use]]] = {}

    def record_norm(self, out: Tensor) -> None:
        """The pass's next norm returned `out`."""
        self._norms.append([])
        self._traced[id(out)] = (out, self._norms[-1])

    def record_use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A torch function was called with these arguments, or the module returned them."""
        for value in tensor_leaves((args, kwargs)):
            if id(value) in self._traced:
                self._traced[id(value)][1].append(_Use("relu" if func in RELUS else ""))

    def record_result(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """The call of the last `record_use` returned `out`."""
        if func in RELUS:
            x = args[0] if args else kwargs["input"]
            if id(x) in self._traced:  # an in-place ReLU: from here on the tensor is its output
                self._traced[id(out)] = (out, self._traced[id(x)][1][-1].then)
        pair = summands(args, kwargs) if func in ADDITIONS else None
        if pair is None or pair[0].shape != pair[1].shape:
            return
        use = _Use("add")
        # An in-place addition is fused only if it writes into the norm's own output.
        for value in pair[:1] if func is Tensor.add_ else pair:
            if id(value) in self._traced:
                self._traced[id(value)][1][-1] = use
        self._traced[id(out)] = (out, use.then)

    def fusions(self) -> tuple[Fusion, ...]:
        """The possible fusion of each norm, in order; of two norms in one addition, the first."""
        if self.checkpointed:
            return ()
        taken: list[_Use] = []

        def fusion(uses: list[_Use]) -> Fusion:
            if len(uses) != 1:
                return ""
            (use,) = uses
            if use.kind == "add" and use.leads_only_to("relu") and not any(use is t for t in taken):
                taken.append(use)
                return "add_relu"
            return "relu" if use.kind == "relu" else ""

        return tuple(fusion(uses) for uses in self._norms)


def summands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The two tensors that a function of `ADDITIONS` adds, or None if it adds anything else."""
    values = (*args, *(kwargs[name] for name in ("input", "other") if name in kwargs))
    if len(values) != 2 or set(kwargs) - {"input", "other"}:
        return None
    first, second = values
    return (first, second) if isinstance(first, Tensor) and isinstance(second, Tensor) else None


class FusedNorms:
    """Runs the norms of one forward pass with the fusions that a trace found.

    Args:
        fusions: of each norm, in order; empty if nothing is fused.
    """

    def __init__(self, fusions: Sequence[Fusion] = ()) -> None:
        self.fusions = fusions
        self._position = 0
        # By `id` of the tensor that the module holds; entries hold that tensor, see `FusionTracer`.
        self._rectified: dict[int, tuple[Tensor, Tensor]] = {}
        self._pending: dict[int, tuple[Tensor, Callable[[Tensor], Tensor]]] = {}

    def run_norm(self, x: Tensor, norm: Callable[[bool, Tensor | None], Tensor]) -> Tensor:
        """The output of the pass's next norm, or what stands for it until its addition comes.

        Args:
            norm: `norm(relu, summand)` runs the kernel with this epilogue.
        """
        self._position += 1
        fused = self._position <= len(self.fusions)
        fusion: Fusion = self.fusions[self._position - 1] if fused else ""
        if fusion == "add_relu":
            placeholder = x.detach()
            self._pending[id(placeholder)] = (placeholder, lambda summand: norm(True, summand))
            return placeholder
        out = norm(fusion == "relu", None)
        if fusion == "relu":
            self._rectified[id(out)] = (out, out)
        return out

    def run_relu(self, x: Any) -> Tensor | None:
        """The ReLU of a fused norm's output; None if `x` is none."""
        return self._rectified.pop(id(x))[1] if id(x) in self._rectified else None

    def run_addition(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """An addition with a pending norm, and the ReLU after it; None if no norm is pending."""
        pair = summands(args, kwargs) if self._pending else None
        if pair is None or not any(self.is_placeholder(value) for value in pair):
            return None
        norm, summand = pair if self.is_placeholder(pair[0]) else (pair[1], pair[0])
        out = self._pending.pop(id(norm))[1](summand)
        held = norm if func is Tensor.add_ else out  # in place: the module keeps the placeholder
        self._rectified[id(held)] = (held, out)
        return held

    def is_placeholder(self, value: Any) -> bool:
        """True if `value` stands for the output of a norm that has not run yet."""
        return id(value) in self._pending

    @property
    def unfinished(self) -> bool:
        """True if the pass did not do what the traced pass did."""
        skipped = bool(self.fusions) and self._position != len(self.fusions)
        return bool(self._rectified or self._pending or skipped)
