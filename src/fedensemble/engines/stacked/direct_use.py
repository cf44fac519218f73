"""Parameters that a module uses outside of layers: class tokens, positions, layer scales, LoRA.

Such a parameter is a value without a batch, [J, *shape] in a stacked pass where the module expects
[*shape]. `DirectUses` runs each function that gets such a value once for all visits, by `vmap` over
the visits alone: value j meets the examples of visit j. A result without a batch, such as
`token.expand(1, 4, -1)`, is such a value again. The rest of the pass stays stacked, with its
handlers and kernels.

Where the batch is in each argument and result comes from `call_log.py`. Only calls that need it are
looked up in training: the check before training finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from ...errors import InputError, first_line
from ...flat_params import tensor_leaves
from ...modeling.attention import scaled_dot_product_attention
from ...runtime.torch_compat import weight_norm
from .call_log import UNCLEAR, Call, leaves, map_leaves
from .errors import MIXES_EXAMPLES, PATH_CHANGED, NotStackable

# Functions that compute in the dtype of matmuls.
MATMULS = {
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.mv,
    torch.einsum,
    torch.addmm,
    torch.baddbmm,
    torch.tensordot,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    Tensor.mm,
    Tensor.bmm,
    F.linear,
    F.bilinear,
    F.scaled_dot_product_attention,
    *(getattr(F, f"conv{more}{n}d") for more in ("", "_transpose") for n in (1, 2, 3)),
}
# Random functions that are called with a tensor. Their keyed replacements want the visits in front.
RANDOM = {
    F.dropout,
    torch.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    torch.feature_dropout,
    torch.rand_like,
    torch.randn_like,
    torch.bernoulli,
    Tensor.bernoulli,
}


class DirectUses:
    """Follows one stacked pass, and runs its calls that get values without a batch.

    Args:
        calls: of the pass; None for calls that need nothing from here.
        visits: J.
        params: stacked parameters and buffers by name, each [J, *shape].
        compute: dtype of matmuls.
    """

    def __init__(
        self,
        calls: Sequence[Call | None],
        visits: int,
        params: Mapping[str, Tensor],
        compute: torch.dtype,
    ) -> None:
        self._calls, self._visits, self._compute = calls, visits, compute
        self.position = 0  # of the next call
        # By `id`, with the parameter that a value is computed from. The entries hold the tensor, so
        # that no other one gets its `id` during the pass.
        self._values = {id(tensor): (tensor, name) for name, tensor in params.items()}
        self.needed: set[int] = set()  # positions of the calls that were run from here

    def next_call(self, func: Any) -> Call | None:
        """The record of the pass's next call; raises if another function is called than then."""
        self.position += 1
        if self.position > len(self._calls):
            raise InputError(PATH_CHANGED)
        call = self._calls[self.position - 1]
        # Not `is not`: the getter of a property, such as `shape`, is a new object at each use.
        if call is not None and call.function != func:
            raise InputError(PATH_CHANGED)
        return call

    @property
    def unfinished(self) -> bool:
        """True if the pass made fewer calls than the recorded one."""
        return self.position != len(self._calls)

    def has_value(self, arguments: Any) -> bool:
        """True if there is a value without a batch among the arguments of a function."""
        return any(id(leaf) in self._values for leaf in leaves(arguments))

    def batch_in_front(self, call: Call, args: Any, kwargs: Any) -> bool:
        """True if the first argument, the input of a layer, is a batch [J * B, ...]."""
        for leaf, batch in zip(leaves((args, kwargs)), call.inputs, strict=True):
            if isinstance(leaf, Tensor):
                return batch == 0 and id(leaf) not in self._values
        return False

    def run(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of `func`, run for each visit."""
        self.needed.add(self.position - 1)
        self._check(call, func, args, kwargs)
        name = self._name_of((args, kwargs))
        split, in_dims = self._split_visits(call, func, (args, kwargs))
        tensors = [leaf for leaf in leaves(split) if isinstance(leaf, Tensor)]
        function = _ELEMENTARY.get(func, func)
        results: Any = None

        def run_visit(*of_visit: Tensor) -> tuple[Tensor, ...]:
            nonlocal results
            visit = iter(of_visit)
            own_args, own_kwargs = map_leaves(
                lambda leaf: next(visit) if isinstance(leaf, Tensor) else leaf, split
            )
            results = function(*own_args, **own_kwargs)
            return tuple(leaf for leaf in leaves(results) if isinstance(leaf, Tensor))

        if not call.outputs:  # a shape or a dtype: that of the first visit
            pairs = zip(tensors, in_dims, strict=True)
            run_visit(*(tensor if dim is None else tensor.select(dim, 0) for tensor, dim in pairs))
            return results
        if UNCLEAR in call.outputs:
            raise NotStackable(f"{MIXES_EXAMPLES}, in {describe_function(func)}")
        try:
            out_dims = tuple(batch or 0 for batch in call.outputs)
            stacked = vmap(run_visit, tuple(in_dims), out_dims)(*tensors)
        except RuntimeError as error:
            raise NotStackable(
                f"{describe_function(func)}, which gets the parameter '{name}', cannot run for "
                f"many models at once: {first_line(error)}"
            ) from error
        joined = iter(
            self._join_visits(tensor, batch, name)
            for tensor, batch in zip(stacked, call.outputs, strict=True)
        )
        out = map_leaves(lambda leaf: next(joined) if isinstance(leaf, Tensor) else leaf, results)
        return iter(out) if func is Tensor.__iter__ else out

    def run_random(self, call: Call, replacement: Any, args: Any, kwargs: Any) -> Any:
        """The result of a keyed random function, whose visits must be in front.

        The masks of a visit are drawn for its own numbers in their order, so the visits of a batch
        in another dimension are moved to the front, and a value [J, T, ...] becomes [J * T, ...].
        """
        self.needed.add(self.position - 1)
        name = self._name_of((args, kwargs))
        split, in_dims = self._split_visits(call, None, (args, kwargs))
        if all(dim is None for dim in in_dims):
            raise NotStackable("random numbers are drawn for a tensor without a batch dimension")
        dims = iter(in_dims)
        numbers = False  # values of shape [], which are [J] here

        def move_to_front(leaf: Any) -> Any:
            nonlocal numbers
            if not isinstance(leaf, Tensor) or (dim := next(dims)) is None:
                return leaf
            leaf = leaf.movedim(dim, 0)
            numbers = leaf.dim() == 1
            return leaf if numbers else leaf.flatten(0, 1)

        args, kwargs = map_leaves(move_to_front, split)
        out: Tensor = replacement(*args, **kwargs)
        out = out if numbers else out.reshape(self._visits, -1, *out.shape[1:])
        batch = call.outputs[0]
        return self._join_visits(out.movedim(0, batch or 0), batch, name)

    def _split_visits(self, call: Call, func: Any, arguments: Any) -> tuple[Any, list[int | None]]:
        """The arguments with a dimension of visits, and where it is in each tensor."""
        in_dims: list[int | None] = []
        dtype = self._common_dtype(func, arguments)
        batches = iter(call.inputs)

        def split(leaf: Any) -> Any:
            batch = next(batches)
            if not isinstance(leaf, Tensor):
                return leaf // self._visits if batch is not None else leaf
            leaf_dtype = dtype if leaf.is_floating_point() else leaf.dtype
            if id(leaf) in self._values:
                in_dims.append(0)
                return leaf.to(leaf_dtype)
            if batch == UNCLEAR:
                raise NotStackable(f"{MIXES_EXAMPLES}, before {describe_function(call.function)}")
            in_dims.append(batch)
            leaf = leaf.to(leaf_dtype)
            return leaf if batch is None else leaf.unflatten(batch, (self._visits, -1))

        return map_leaves(split, arguments), in_dims

    def _common_dtype(self, func: Any, arguments: Any) -> Any:
        """The dtype of floating-point arguments: with bf16 matmuls activations have another one."""
        if func in MATMULS:
            return self._compute
        dtypes = [t.dtype for t in tensor_leaves(arguments) if t.is_floating_point()]
        return reduce(torch.promote_types, dtypes, dtypes[0]) if dtypes else None

    def _join_visits(self, tensor: Tensor, batch: int | None, name: str) -> Tensor:
        """A result as the module sees it: a batch [J * B, ...], or a value, which is noted."""
        if batch is not None:
            return tensor.flatten(batch, batch + 1)
        self._values[id(tensor)] = (tensor, name)
        return tensor

    def _name_of(self, arguments: Any) -> str:
        """Name of the first parameter from which the arguments are computed."""
        names = (
            self._values[id(leaf)][1] for leaf in leaves(arguments) if id(leaf) in self._values
        )
        return next(names, "")

    def _check(self, call: Call, func: Any, args: Any, kwargs: Any) -> None:
        """Raises for functions that write to a parameter, or whose random numbers have no key."""
        name = str(getattr(func, "__name__", func))
        in_place = name.endswith("_") and not name.endswith("__") and id(args[0]) in self._values
        if in_place or func is Tensor.__setitem__ or kwargs.get("out") is not None:
            raise NotStackable(
                f"{describe_function(func)} writes to a tensor, and gets the parameter "
                f"'{self._name_of((args, kwargs))}'"
            )
        p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        if func is F.scaled_dot_product_attention and p > 0:
            raise NotStackable(
                f"attention with dropout gets the parameter '{self._name_of((args, kwargs))}'"
            )


def describe_function(func: Any) -> str:
    """The name of a function for a message; that of a property is the property's."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner, "__name__", getattr(func, "__name__", func)))


def _bilinear(x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As F.bilinear."""
    out = torch.einsum("...a,oab,...b->...o", x1, weight, x2)
    return out if bias is None else out + bias


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """The weight of nn.utils.parametrizations.weight_norm: `g` times `v` divided by its norm."""
    others = None if dim == -1 else tuple(n for n in range(v.dim()) if n != dim)
    norm: Tensor = torch.linalg.vector_norm(v, dim=others, keepdim=dim != -1)
    return g * v / norm


# What runs in place of functions that `vmap` does not batch, or only slowly.
_ELEMENTARY: dict[Any, Any] = {
    F.scaled_dot_product_attention: partial(scaled_dot_product_attention, F.dropout),
    F.bilinear: _bilinear,
    weight_norm(): _weight_norm,
    Tensor.__iter__: torch.unbind,
}
