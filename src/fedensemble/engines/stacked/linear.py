"""Linear layers, embeddings and PReLU with stacked parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .errors import LOOKUP, NotStackable
from .handlers import handles

if TYPE_CHECKING:
    from .forward import StackedForward


@handles(F.linear, layer=True, takes_frozen=True)
def linear(
    forward: StackedForward, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """As F.linear with weights [J, out, in], or a weight [out, in] that all visits share."""
    if weight.dim() == 2 and not forward.is_stacked(weight):
        return _shared_linear(forward, x, weight, bias)
    if bias is not None and bias.dim() == 1:
        bias = forward.stack(bias)
    if weight.dim() != 3:
        raise NotStackable("a linear layer's weight is not a stacked parameter")
    rows = x.reshape(forward.visits, -1, x.shape[-1]).to(forward.compute)
    param = forward.params.get(id(weight))
    matches = param is not None and param.weight.dtype == forward.compute
    if matches and dispatch.triton_supported(rows):
        from ..kernels.triton.linear import StackedLinear

        bias_param = forward.params.get(id(bias))
        out = StackedLinear.apply(rows, weight, bias, param, bias_param)  # type: ignore[no-untyped-call]
        return out.reshape(*x.shape[:-1], out.shape[-1])  # type: ignore[no-any-return]
    matrix = weight.transpose(1, 2).to(forward.compute)
    if bias is None:
        out = torch.bmm(rows, matrix)
    else:
        out = torch.baddbmm(bias.unsqueeze(1).to(forward.compute), rows, matrix)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _shared_linear(
    forward: StackedForward, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """As F.linear: one matmul for the examples of all visits; the bias may be [J, out]."""
    own_bias = bias is not None and bias.dim() == 2
    x, weight = x.to(forward.compute), forward.frozen.cast(weight, forward.compute)
    bias = bias if bias is None else bias.to(forward.compute)
    out = F.linear(x, weight, None if own_bias else bias)
    if not own_bias or bias is None:
        return out
    return (out.reshape(forward.visits, -1, out.shape[-1]) + bias.unsqueeze(1)).reshape(out.shape)


@handles(F.embedding, layer=True)
def embedding(
    forward: StackedForward,
    tokens: Tensor,
    weight: Tensor,
    padding_idx: Any = None,
    *others: Any,
    **named: Any,
) -> Tensor:
    """As F.embedding with weights [J, V, D]."""
    plain = not any(others[1:]) and not any(
        value for key, value in named.items() if key != "norm_type"
    )
    if others[:1] not in ((), (None,)) or not plain or weight.dim() != 3:
        raise NotStackable("an embedding with a norm or sparse gradients")
    if tokens.numel() % forward.visits:
        raise NotStackable(LOOKUP)
    offset = torch.arange(forward.visits, device=tokens.device).reshape(-1, 1) * weight.shape[1]
    rows = tokens.reshape(forward.visits, -1) + offset
    out = F.embedding(rows, weight.flatten(0, 1)).reshape(*tokens.shape, weight.shape[-1])
    if padding_idx is None:
        return out
    # The embedding of the padding token gets no gradient.
    is_padding = (tokens == padding_idx % weight.shape[1]).unsqueeze(-1)
    return torch.where(is_padding, out.detach(), out)


@handles(F.prelu, layer=True)
def prelu(forward: StackedForward, x: Tensor, weight: Tensor) -> Tensor:
    """As F.prelu with weights [J, 1] or [J, C]."""
    if weight.dim() != 2 or x.dim() < 2:
        raise NotStackable("a PReLU without a batch, or whose weight is not a stacked parameter")
    split = forward.split(x)
    scale = weight.reshape(forward.visits, 1, -1, *(1,) * (x.dim() - 2)).to(x.dtype)
    return torch.where(split > 0, split, scale * split).reshape(x.shape)
