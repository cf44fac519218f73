"""Attention in elementary operations, with keyed dropout.

torch's attention functions draw the masks of their dropout inside a fused kernel, from the global
generator, so that a run could not be repeated. Here the attention weights are a tensor that an
ordinary keyed dropout works on. Both engines use these functions; the stacked forward pass passes
its own linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import InputError
from ..runtime.torch_compat import is_transformed

Dropout = Callable[[Tensor, float, bool], Tensor]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Repeat = Callable[[Tensor, int], Tensor]


def scaled_dot_product_attention(
    dropout: Dropout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As F.scaled_dot_product_attention; `dropout` has the signature of F.dropout."""
    if enable_gqa:
        query_heads = query.shape[-3]
        key = key.repeat_interleave(query_heads // key.shape[-3], -3)
        value = value.repeat_interleave(query_heads // value.shape[-3], -3)
    if dropout_p == 0 and attn_mask is None and _fits_flash(query, key, value, is_causal):
        out: Tensor = _FlashAttention.apply(query, key, value, is_causal, scale)  # type: ignore[no-untyped-call]
        return out
    # In bf16 torch's own operations compute in float32, which the code below does not.
    if dropout_p == 0 and not (query.is_cuda and query.dtype == torch.bfloat16):
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels do not support `vmap`
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, is_causal=is_causal, scale=scale
            )
    if is_causal:
        attn_mask = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
        ).tril()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    return dropout(_softmax(scores, attn_mask), dropout_p, True) @ value


def _fits_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """True if the flash kernel of a GPU can take these tensors."""
    if not (query.is_cuda and query.dtype == key.dtype == value.dtype == torch.bfloat16):
        return False
    if query.dim() != 4 or any(is_transformed(x) for x in (query, key, value)):
        return False
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, is_causal, False)
    return torch.backends.cuda.can_use_flash_attention(params)


class _FlashAttention(torch.autograd.Function):
    """Attention by the flash kernel, whose gradient is the same in every run.

    The kernel adds up the gradients of queries in any order, unless torch's deterministic mode is
    on while the backward pass is launched. To set it there and nowhere else, the kernel has an
    autograd graph of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
    ) -> Tensor:
        q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
        with torch.enable_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        ctx.graph = out, (q, k, v)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        out, inputs = ctx.graph
        with _deterministic_algorithms():
            return *torch.autograd.grad(out, inputs, grad_output), None, None


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """Turns on torch's deterministic mode, without filling new tensors."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def multi_head_attention(
    dropout: Dropout,
    linear: Linear,
    repeat: Repeat,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As F.multi_head_attention_forward, which nn.MultiheadAttention calls.

    The weights of the projections are only passed to `linear` and sliced along their last two
    dimensions, so that they may be stacked.

    Args:
        dropout, linear: with the signatures of F.dropout and F.linear.
        repeat: `repeat(bias, B)` is a bias [1, 1, E] for each example, [B, 1, E].
        is_causal: ignored; torch's function needs the mask as well.
    """
    if static_k is not None or static_v is not None:
        raise InputError("Attention with static keys or values is not supported; leave them out.")
    unbatched = query.dim() == 2
    if unbatched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    same = query is key and key is value
    # [T, B, E] -> [B, T, E], because linear layers want the batch in front.
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    size = query.shape[-1]
    if use_separate_proj_weight:
        weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None
        weights = torch.split(in_proj_weight, size, dim=-2)
    biases: Any = (None,) * 3 if in_proj_bias is None else torch.split(in_proj_bias, size, dim=-1)
    if same and in_proj_weight is not None:
        projected: Any = linear(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        projected = map(linear, (query, key, value), weights, biases)
    q, k, v = projected
    mask = _merge_masks(attn_mask, key_padding_mask, num_heads, q.dtype)
    if bias_k is not None and bias_v is not None:  # one more position, with a learned key and value
        k, v = (
            torch.cat([x, repeat(bias, len(x)).to(x.dtype)], dim=1)
            for x, bias in ((k, bias_k), (v, bias_v))
        )
        mask = None if mask is None else F.pad(mask, (0, 1))
    if add_zero_attn:  # one more position, whose key and value are 0
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        mask = None if mask is None else F.pad(mask, (0, 1))
    # [B, T, E] -> [B, H, T, E / H]
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    p = dropout_p if training else 0.0
    attention = None
    if need_weights:
        attention = _softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1), mask)
        attention = dropout(attention, p, True) if p > 0 else attention
        heads = attention @ v
        attention = attention.mean(1) if average_attn_weights else attention
    else:
        heads = scaled_dot_product_attention(dropout, q, k, v, mask, p)
    out = linear(heads.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias).transpose(0, 1)
    if unbatched:
        return out.squeeze(1), None if attention is None else attention.squeeze(0)
    return out, attention


def _merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_heads: int, dtype: torch.dtype
) -> Tensor | None:
    """The masks of nn.MultiheadAttention as one tensor that is added to scores [B, H, T, S].

    In its boolean masks True means "may not attend", the opposite of F's function.
    """
    merged = None
    if attn_mask is not None:
        merged = _as_summand(attn_mask, dtype)
        if merged.dim() == 3:  # one per example and head, [B * H, T, S]
            merged = torch.unflatten(merged, 0, (-1, num_heads))
    if key_padding_mask is not None:
        padding = _as_summand(key_padding_mask, dtype)[:, None, None, :]
        merged = padding if merged is None else merged + padding
    return merged


def _as_summand(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Attention weights; those of a query that may attend to nothing are 0, as in torch's kernels.

    Args:
        mask: added to the scores, or boolean and True where a query may attend.
    """
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    # The softmax of a row of -inf is nan, and so is its gradient, whatever is selected afterwards.
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
