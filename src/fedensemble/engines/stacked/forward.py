"""One forward pass for J visits: stacked parameters, and one batch that holds all their examples.

The inputs of all visits form one batch [J * B, ...], and the module's parameters are replaced by
stacks [J, *shape]. Layers with parameters (linear, convolution, norms, embedding, recurrent) are
replaced by handlers that apply parameter j to the examples of visit j. Everything between them
(activations, pooling, reshapes) works on the large batch without knowing of the stack, and so does
a layer whose parameters are all frozen: they are the same for all visits and have no stack. No
`vmap` is involved: ordinary autograd of the sum of the visits' losses gives each visit its own
gradient.

A module may also use a parameter outside of a layer, such as a class token. `DirectUses` runs these
calls for each visit, if it is given a record of the pass; without one they raise `NotStackable`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from ... import prng
from ...errors import InputError
from ...flat_params import tensor_leaves
from ...modeling.keyed_rng import REPLACEMENTS, KeyedRandomness

# Imported for the handlers they register.
from . import (  # noqa: F401
    attention,
    convolution,
    dispatch,
    grouped_convolution,
    linear,
    normalization,
    recurrent,
)
from .call_log import Call, leaves, map_leaves
from .direct_use import MATMULS, RANDOM, DirectUses, describe_function
from .errors import CONTROL_FLOW, PATH_CHANGED, NotStackable
from .fusion import ADDITIONS, RELUS, FusedNorms, FusionTracer
from .handlers import HANDLERS, Handler, handles
from .stacked_params import FrozenParams, StackedParam

# Properties of a stacked parameter that a module may read: they do not depend on its shape.
_HARMLESS = {
    "data_ptr",
    "dtype",
    "device",
    "requires_grad",
    "is_cuda",
    "layout",
    "is_floating_point",
}


class StackedForward(KeyedRandomness):
    """While active, layers see J stacked parameters and one batch with the examples of J visits.

    Args:
        key: PRNG keys of the visits' random layers, [J].
        stacked: the module's tensors by name, each [J, *shape].
        compute: dtype of matmuls, torch.bfloat16 or that of the parameters.
        params: the parameters as kernels read them, by `id` of the stacked tensor.
        fused: runs norms together with what follows them.
        tracer: records which norms could be fused.
        calls: the calls of the pass, for modules that use parameters outside of layers.
        frozen: the parameters that all visits share.
    """

    def __init__(
        self,
        key: Tensor,
        stacked: Mapping[str, Tensor],
        compute: torch.dtype,
        params: Mapping[int, StackedParam] | None = None,
        fused: FusedNorms | None = None,
        tracer: FusionTracer | None = None,
        calls: Sequence[Call | None] | None = None,
        frozen: FrozenParams | None = None,
    ) -> None:
        super().__init__(key)
        self.visits, self.compute = len(key), compute
        self.params = params or {}
        self.frozen = frozen or FrozenParams({}, {})
        self.fused, self.tracer = fused or FusedNorms(), tracer
        self.statistics: dict[int, Tensor] = {}  # new running statistics, by `id` of the old ones
        self._names = {id(tensor): name for name, tensor in stacked.items()}
        self.direct = None if calls is None else DirectUses(calls, self.visits, stacked, compute)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # torch detaches what it saves again; the forward pass has no such calls.
        if self.recomputing and sys._getframe(1).f_globals.get("__name__") == checkpoint.__name__:
            return func(*args, **kwargs)
        if self.tracer is not None:
            self.tracer.record_use(func, args, kwargs)
        if self.fused.fusions:
            out = self._run_fused(func, args, kwargs)
            if out is not None:
                return out
        if self.direct is not None:
            run = self._find_direct_run(self.direct, func, args, kwargs)
            if run is not None:
                return run()
        handler = HANDLERS.get(func)
        if handler is not None:
            first = (kwargs.pop("input"),) if "input" in (kwargs := dict(kwargs)) else ()
            try:
                return self._run_handler(handler, func, (*first, *args), kwargs)
            except NotStackable as reason:
                names = [self._names[id(v)] for v in leaves((args, kwargs)) if id(v) in self._names]
                with_name = f"{reason}, with the parameter '{names[0]}'" if names else str(reason)
                raise NotStackable(with_name) from reason
        self._reject_parameter(func, args, kwargs)
        args, kwargs = self._cast_for_matmul(func, args, kwargs)
        out = super().__torch_function__(func, types, args, kwargs)
        if self.tracer is not None:
            self.tracer.record_result(func, args, kwargs, out)
        return out

    def _reject_parameter(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raises if a function without a handler gets a stacked parameter."""
        if any(id(value) in self._names for value in (*args, *kwargs.values())):
            name = describe_function(func)
            if name not in _HARMLESS:
                # With a record of the pass, this call used no parameter in the check.
                if self.direct is not None:
                    raise InputError(PATH_CHANGED)
                raise NotStackable(f"the module uses a parameter in {name}")

    def _cast_for_matmul(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The arguments of a function without stacks; those of a matmul have one dtype.

        With bf16, a frozen parameter or a constant would otherwise meet activations of another.
        """
        if func not in MATMULS or self.compute != torch.bfloat16:
            return args, kwargs
        dtypes = {t.dtype for t in tensor_leaves((args, kwargs)) if t.is_floating_point()}
        if len(dtypes) < 2:
            return args, kwargs
        return map_leaves(partial(_cast_float, self.compute, self.frozen), (args, kwargs))

    def _run_handler(self, handler: Handler, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a handler, or of the function itself if all its parameters are frozen."""
        if handler.takes_frozen or not self.frozen.tensors:
            return handler.run(self, *args, **kwargs)
        given = list(leaves((args, kwargs)))
        if not any(value in self.frozen for value in given):
            return handler.run(self, *args, **kwargs)
        if handler.layer and not self.is_stacked(given):
            dtype = self.compute if func in MATMULS else given[0].dtype
            if dtype.is_floating_point:  # tokens are not
                cast = partial(_cast_float, dtype, self.frozen)
                args, kwargs = map_leaves(cast, (args, kwargs))
            return func(*args, **kwargs)
        args, kwargs = map_leaves(self.expand_frozen, (args, kwargs))
        return handler.run(self, *args, **kwargs)

    def is_stacked(self, value: Any) -> bool:
        """True if a stacked parameter, or a value computed from one, is among these."""
        if any(id(leaf) in self._names for leaf in leaves(value)):
            return True
        return self.direct is not None and self.direct.has_value(value)

    def expand_frozen(self, value: Any) -> Any:
        """A frozen parameter as a stack [J, *shape]; anything else as it is."""
        return self.stack(value) if value in self.frozen else value

    def stack(self, value: Tensor) -> Tensor:
        """A tensor [*shape] that all visits share as a stack [J, *shape], on a CPU without copies.

        The kernels of a GPU want the rows of a stack at different addresses.
        """
        rows = value.expand(self.visits, *value.shape)
        return rows.contiguous() if rows.is_cuda else rows

    def _find_direct_run(
        self, direct: DirectUses, func: Any, args: Any, kwargs: Any
    ) -> Callable[[], Any] | None:
        """What runs a call with a value without a batch, or None for an ordinary call."""
        call = direct.next_call(func)
        if call is None or func is Tensor.data_ptr:
            return None
        is_layer = func in HANDLERS and HANDLERS[func].layer
        if is_layer and not direct.has_value((args, kwargs)) and self._has_frozen(args, kwargs):
            return None  # `_run_handler` knows which dtype its parameters need
        if func in RANDOM or is_layer:
            if direct.batch_in_front(call, args, kwargs):
                return None
            if func in RANDOM:
                replacement = partial(REPLACEMENTS[func], self)
                return partial(direct.run_random, call, replacement, args, kwargs)
        elif func in HANDLERS:
            return None
        if not direct.has_value((args, kwargs)):
            # A layer whose weights are constants runs on the large batch as it is.
            return partial(func, *args, **kwargs) if is_layer else None
        return partial(direct.run, call, func, args, kwargs)

    def _has_frozen(self, *arguments: Any) -> bool:
        return any(leaf in self.frozen for leaf in leaves(arguments))

    def _run_fused(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        if func in RELUS:
            out = self.fused.run_relu(args[0] if args else kwargs.get("input"))
        else:
            out = self.fused.run_addition(func, args, kwargs) if func in ADDITIONS else None
        if out is None and any(map(self.fused.is_placeholder, (*args, *kwargs.values()))):
            raise InputError(PATH_CHANGED)
        return out

    # A checkpointed part runs again in the backward pass. It must find the recorded calls of its
    # parameters at the same positions, and must not update running statistics again.

    def checkpoint_contexts(
        self,
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if self.tracer is not None:
            self.tracer.checkpointed = True
        return super().checkpoint_contexts()

    def position(self) -> Any:
        call = 0 if self.direct is None else self.direct.position
        return self.calls, call, dict(self.statistics)

    def go_to(self, position: Any) -> None:
        self.calls, call, self.statistics = position
        self.tracer = None  # it has seen the forward pass
        if self.direct is not None:
            self.direct.position = call

    # Random layers: one key per visit, and a visit's numbers run over its own examples, so that
    # dropout masks equal those of a pass with this visit alone.

    def _drop(self, x: Tensor, shape: Any, p: float, training: bool) -> Tensor:
        if not training or p == 0:
            return x
        if p == 1:
            return x * 0
        size = torch.Size(shape).numel() // self.visits
        keys = torch.as_tensor(self.next_key())
        mask = dispatch.dropout_mask(keys, size, int(p * 2**63)).reshape(tuple(shape))
        return x * (mask.to(x.dtype) / (1 - p))

    def next_key(self) -> prng.Key:
        self.calls += 1
        return dispatch.fold_in(torch.as_tensor(self.key), self.calls)

    def uniform(self, shape: Any, device: torch.device) -> Tensor:
        """Uniform random numbers, drawn per visit."""
        if not shape or shape[0] % self.visits:
            raise NotStackable("the module draws random numbers whose shape has no batch dimension")
        size = torch.Size(shape).numel() // self.visits
        return prng.uniform(self.next_key(), size).reshape(tuple(shape))

    def split(self, x: Tensor) -> Tensor:
        """The batch [J * B, ...] by visit, [J, B, ...]."""
        return x.reshape(self.visits, -1, *x.shape[1:])


def _cast_float(dtype: torch.dtype, frozen: FrozenParams, value: Any) -> Any:
    """A floating-point tensor in this dtype; anything else as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return frozen.cast(value, dtype)


# Functions that hand tensor values to Python. All clients' examples are one batch, so a decision
# made from them would be made for all clients at once.
@handles(
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__array__,
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.equal,
    Tensor.allclose,
    Tensor.is_nonzero,
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
    Tensor.__contains__,
    Tensor.__dlpack__,
)
def reject_control_flow(forward: StackedForward, *args: Any, **kwargs: Any) -> Any:
    """Raises NotStackable."""
    raise NotStackable(f"its forward pass {CONTROL_FLOW}, such as `if x.max() > 1` or x.item()")
