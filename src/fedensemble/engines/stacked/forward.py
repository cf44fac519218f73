"""J models in one forward pass: batches folded together, weights stacked, layers batched over
clients.

The inputs of all visits are folded into one batch [J * B, ...] and a module's parameters replaced
by stacks [J, *shape]. Layers that have weights (linear, convolution, norms, embedding, recurrent)
are taken over by kernels that know the stack; everything between them (activations, pooling,
reshapes) never notices. There is no `vmap`: ordinary autograd of the sum of the visits' losses
gives every visit its own gradient. A module that uses its parameters in any other way raises
`NotStackable`, and the engine falls back to `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import prng
from ...errors import InputError
from ...modeling.recurrent import RECURRENT
from . import dispatch
from .convolution import FoldedConvolutions
from .fusion import OTHER_WAYS, RELUS, SUMS, Fusion, Watch
from .normalization import NotStackable
from .stacked_params import StackedParam

_ASKED = {
    "data_ptr",
    "dtype",
    "device",
    "requires_grad",
    "is_cuda",
    "layout",
    "is_floating_point",
}  # harmless questions to a stack


DECIDES = "decides by numbers"
LOOKUP = "an embedding of numbers without a batch, such as positions; torch.arange(T).expand(len(x), T) has one"


class Folded(FoldedConvolutions):
    """While active, layers see J stacked weights and a folded batch.

    Args:
        key: of the visits' random layers, [J].
        stacked: the module's tensors by name, each [J, *shape].
        compute: the type that products are computed in, torch.bfloat16 or that of the weights.
        pieces: what products read of the parameters, by their identity.
        fates: for each BatchNorm, GroupNorm and, on a CPU, convolution of the pass, what it does of
            that which comes after it; empty if none does.
        watch: looks which ones could.
    """

    def __init__(
        self,
        key: Tensor,
        stacked: Mapping[str, Tensor],
        compute: torch.dtype,
        pieces: Mapping[int, StackedParam] | None = None,
        fates: Sequence[Fusion] = (),
        watch: Watch | None = None,
    ) -> None:
        super().__init__(key, pieces or {}, compute, fates, watch)
        self.stacks = {id(tensor) for tensor in stacked.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.watch is not None:
            self.watch.used(func, args, kwargs)
        if self.fates and func in RELUS:
            out = self.rectify(args[0] if args else kwargs.get("input"))
            if out is not None:
                return out
        if self.waiting and func in SUMS:
            out = self.add(func, args, kwargs)
            if out is not None:
                return out
        if (
            self.fates
            and func is not F.max_pool2d
            and any(map(self.stands_in, (*args, *kwargs.values())))
        ):
            raise InputError(OTHER_WAYS)
        if func in RECURRENT:
            return self.recurrent(func, *args, **kwargs)
        taken = _TAKEN_OVER.get(func)
        if taken is not None:
            first = (kwargs["input"],) if "input" in kwargs else ()
            return taken(
                self,
                *first,
                *args,
                **{_NAMES.get(n, n): v for n, v in kwargs.items() if n != "input"},
            )
        if any(id(value) in self.stacks for value in (*args, *kwargs.values())):
            asked = getattr(
                getattr(func, "__self__", None), "__name__", getattr(func, "__name__", str(func))
            )
            if asked not in _ASKED:
                raise NotStackable(f"the module uses a parameter in {asked}")
        out = super().__torch_function__(func, types, args, kwargs)
        if self.watch is not None:
            self.watch.gave(func, args, kwargs, out)
        return out

    def _drop(self, x: Tensor, shape: Any, p: float, training: bool) -> Tensor:
        """Dropout with a mask for each visit; as without folding, numbers run over a visit's own
        tensor.
        """
        if not training or p == 0:
            return x
        if p == 1:
            return x * 0
        size = torch.Size(shape).numel() // self.visits
        kept = dispatch.kept(torch.as_tensor(self.next_key()), size, int(p * 2**63)).reshape(
            tuple(shape)
        )
        return x * (kept.to(x.dtype) / (1 - p))

    def next_key(self) -> prng.Key:
        self.calls += 1
        return dispatch.fold(torch.as_tensor(self.key), self.calls)

    def uniform(self, shape: Any, device: torch.device) -> Tensor:
        """Random numbers for folded shapes."""
        if not shape or shape[0] % self.visits:
            raise NotStackable("the module draws random numbers that do not go with its batch")
        size = torch.Size(shape).numel() // self.visits
        return prng.uniform(self.next_key(), size).reshape(tuple(shape))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As F.linear with weights [J, out, in]."""
        if weight.dim() != 3:
            raise NotStackable("a linear layer's weight is not a stacked parameter")
        given = x.reshape(self.visits, -1, x.shape[-1]).to(self.compute)
        piece = self.pieces.get(id(weight))
        if piece is not None and piece.weight.dtype == self.compute and dispatch.quick(given):
            from ..kernels.triton.linear import StackedLinear

            out = StackedLinear.apply(given, weight, bias, piece)  # type: ignore[no-untyped-call]
            return out.reshape(*x.shape[:-1], out.shape[-1])  # type: ignore[no-any-return]
        weight = weight.transpose(1, 2).to(self.compute)
        if bias is None:
            out = torch.bmm(given, weight)
        else:
            out = torch.baddbmm(bias.unsqueeze(1).to(self.compute), given, weight)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def recurrent(
        self, func: Any, x: Tensor, initial: Any, weights: Any, *others: Any, **named: Any
    ) -> Any:
        """As torch.lstm and the like with stacks of weights; never below float32, for errors add up
        over time.
        """
        given, self.compute = self.compute, weights[0].dtype
        try:
            weights = [w.contiguous() if w.is_cuda else w for w in weights]
            start = (
                [s.to(self.compute) for s in initial]
                if func is torch.lstm
                else initial.to(self.compute)
            )
            named |= {
                "linear": self.linear,
                "layer_of": self._lstm_layer if func is torch.lstm and x.is_cuda else None,
            }
            return RECURRENT[func](
                self.dropout, x.to(self.compute), start, weights, *others, **named
            )
        finally:
            self.compute = given

    def _lstm_layer(
        self, x: Tensor, state: list[Tensor], weights: Any, cell: Any, backwards: bool, linear: Any
    ) -> tuple[Tensor, list[Tensor]]:
        bias = weights[2] + weights[3] if len(weights) == 4 else None
        given = linear(x, weights[0], bias)
        given = given.flip(1) if backwards else given
        first, cells = (part.contiguous() for part in state)
        outputs, last = dispatch.lstm(given, first, cells, weights[1])
        hidden = outputs[:, -1]
        return outputs.flip(1) if backwards else outputs, [hidden, last]

    def embedding(
        self, tokens: Tensor, weight: Tensor, padding_idx: Any = None, *others: Any, **named: Any
    ) -> Tensor:
        """As F.embedding with weights [J, V, D]."""
        plain = not any(others[1:]) and not any(
            value for key, value in named.items() if key != "norm_type"
        )
        if others[:1] not in ((), (None,)) or not plain or weight.dim() != 3:
            raise NotStackable("an embedding with a norm or sparse gradients")
        if tokens.numel() % self.visits:
            raise NotStackable(LOOKUP)
        first = torch.arange(self.visits, device=tokens.device).reshape(-1, 1) * weight.shape[1]
        rows = tokens.reshape(self.visits, -1) + first
        out = F.embedding(rows, weight.flatten(0, 1)).reshape(*tokens.shape, weight.shape[-1])
        if padding_idx is None:
            return out
        filler = (tokens == padding_idx % weight.shape[1]).unsqueeze(-1)
        return torch.where(filler, out.detach(), out)  # whose row gets no slope

    def prelu(self, x: Tensor, weight: Tensor) -> Tensor:
        """As F.prelu with weights [J, 1] or [J, C]."""
        if weight.dim() != 2 or x.dim() < 2:
            raise NotStackable(
                "a PReLU without a batch, or whose weight is not a stacked parameter"
            )
        split = x.reshape(self.visits, -1, *x.shape[1:])
        slope = weight.reshape(self.visits, 1, -1, *(1,) * (x.dim() - 2)).to(x.dtype)
        return torch.where(split > 0, split, slope * split).reshape(x.shape)

    def look(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses to show numbers: clients' examples are one batch, so a decision would be made for
        all at once.
        """
        raise NotStackable(f"its forward pass {DECIDES}, such as `if x.max() > 1` or x.item()")


_NAMES = {
    "running_mean": "mean",
    "running_var": "variance",
    "num_groups": "groups",
    "normalized_shape": "shape",
}


_LOOKS = (
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
_TAKEN_OVER: dict[Any, Callable[..., Any]] = {
    F.linear: Folded.linear,
    F.conv1d: Folded.conv1d,
    F.conv2d: Folded.conv2d,
    F.batch_norm: Folded.batch_norm,
    F.group_norm: Folded.group_norm,
    F.instance_norm: Folded.instance_norm,
    F.layer_norm: Folded.layer_norm,
    F.rms_norm: Folded.rms_norm,
    F.prelu: Folded.prelu,
    F.embedding: Folded.embedding,
    F.max_pool2d: Folded.max_pool2d,
    **dict.fromkeys(_LOOKS, Folded.look),
}
