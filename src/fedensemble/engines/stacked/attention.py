"""nn.MultiheadAttention with stacked parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from ...modeling.attention import multi_head_attention
from .errors import NotStackable
from .handlers import handles
from .linear import linear

if TYPE_CHECKING:
    from .forward import StackedForward


@handles(F.multi_head_attention_forward, takes_frozen=True)
def multi_head_attention_forward(
    forward: StackedForward, query: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """As F.multi_head_attention_forward with stacked or frozen projections.

    Inputs are [T, J * B, E].
    """
    if query.dim() != 3:
        raise NotStackable("attention without a batch")

    def stacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(forward, x, weight, bias)

    def repeat(bias: Tensor, batch: int) -> Tensor:
        """A stacked bias [J, 1, 1, E], or a frozen [1, 1, E], for each example, [J * B, 1, E]."""
        if bias.dim() == 3:
            return bias.expand(batch, -1, -1)
        return bias.flatten(1, 2).repeat_interleave(batch // forward.visits, 0)

    return multi_head_attention(forward.dropout, stacked_linear, repeat, query, *args, **kwargs)
