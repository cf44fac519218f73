"""BatchNorm and GroupNorm of J visits, fused with an addition and a ReLU after them.

Forward and backward take two passes over the activations each. Between the passes, small kernels
compute the statistics per set and channel, see `batch_norm.py` and `group_norm.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ...stacked.stacked_params import StackedParam
from .batch_norm import BatchNorm
from .group_norm import GroupNorm
from .norm_reductions import apply_affine, reduce_channels
from .tiling import empty_channels_last

Kind = BatchNorm | GroupNorm
# (elements, channels at most, warps) per program, from a search on an H200.
_REDUCE, _APPLY_ALL = (1024, 32, 4), (4096, 64, 2)
# The same for sets with few rows, as GroupNorm has them: one set per example.
_REDUCE_SMALL, _APPLY_SMALL = (2048, 128, 1), (2048, 128, 2)
_SMALL_ROWS = 256, 64  # for the first and the second pass
_PROGRAMS = 1024  # enough to fill the GPU
_MAX_SPLITS = 128  # that one program can add up at once
_MAX_GRID = 65535  # programs on the second and third axis of a grid


def _tile(flat: Tensor, size: int, most: int, warps: int) -> dict[str, int]:
    """Rows and channels that a program handles at once."""
    sets, _, channels = flat.shape
    block_c = min(most, max(8, triton.next_power_of_2(channels)))
    flat_grid = max(sets, triton.cdiv(channels, block_c)) > _MAX_GRID
    return {"BLOCK_R": size // block_c, "BLOCK_C": block_c, "FLAT": flat_grid, "num_warps": warps}


def _grid(inner: int, flat: Tensor, tile: dict[str, int]) -> tuple[int, ...]:
    """The grid: `inner` programs for each set and block of channels."""
    grid = inner, triton.cdiv(flat.shape[2], tile["BLOCK_C"]), len(flat)
    return (math.prod(grid),) if tile["FLAT"] else grid


def _splits(flat: Tensor, tile: dict[str, int]) -> tuple[int, int]:
    """Into how many splits a set's rows are divided for reductions, and their length."""
    sets, rows, channels = flat.shape
    blocks = triton.cdiv(rows, tile["BLOCK_R"])
    wanted = min(_MAX_SPLITS, max(1, _PROGRAMS // (sets * triton.cdiv(channels, tile["BLOCK_C"]))))
    each = triton.cdiv(blocks, wanted)
    return triton.cdiv(blocks, each), each * tile["BLOCK_R"]


def _reduce(
    kind: Kind,
    flat: Tensor,
    grad_output: Tensor,
    statistics: Tensor | None,
    output: Tensor,
    masked_grad: Tensor,
    **flags: bool,
) -> Tensor:
    """The first pass: two sums per set and channel, in splits, [splits, S, 2, C]."""
    sets, rows, channels = flat.shape
    small = isinstance(kind, GroupNorm) and rows <= _SMALL_ROWS[0]
    tile = _tile(flat, *(_REDUCE_SMALL if small else _REDUCE))
    split, split_rows = _splits(flat, tile)
    partial_sums = torch.empty(split, sets, 2, channels, dtype=torch.float32, device=flat.device)
    mean, factor, shift = (
        (partial_sums,) * 3 if statistics is None else (statistics[0], statistics[2], statistics[3])
    )
    reduce_channels[_grid(split, flat, tile)](
        flat,
        grad_output,
        mean,
        factor,
        shift,
        output,
        masked_grad,
        partial_sums,
        rows,
        channels,
        split_rows,
        **flags,
        **tile,
    )
    return partial_sums


def _apply(
    kind: Kind,
    flat: Tensor,
    grad_output: Tensor,
    statistics: Tensor,
    b: Tensor,
    d: Tensor,
    summand: Tensor,
    out: Tensor,
    **flags: bool,
) -> None:
    """The second pass: writes activations or their gradient to `out`, see `apply_affine`."""
    _, rows, channels = flat.shape
    small = isinstance(kind, GroupNorm) and rows < _SMALL_ROWS[1]
    tile = _tile(flat, *(_APPLY_SMALL if small else _APPLY_ALL))
    apply_affine[_grid(triton.cdiv(rows, tile["BLOCK_R"]), flat, tile)](
        flat,
        grad_output,
        statistics[2],
        statistics[3],
        b,
        d,
        summand,
        out,
        rows,
        channels,
        **flags,
        **tile,
    )


class StackedNorm(torch.autograd.Function):
    """Normalized activations, and statistics per set and channel, [4 or more, S, C].

    Args:
        x: [J * B, C, ...].
        weight, bias: [J, C], float32.
        kind: BatchNorm or GroupNorm, with its own arguments.
        relu: whether a ReLU follows.
        params: of weight and bias.
        summand: what is added before the ReLU, shaped like x, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        kind: Kind,
        relu: bool,
        params: tuple[StackedParam | None, StackedParam | None],
        summand: Tensor | None = None,
    ) -> Any:
        last = _channels_last(x)
        flat = last.reshape(kind.sets(len(weight), len(x)), -1, x.shape[1])
        partial_sums = _reduce(
            kind, flat, flat, None, flat, flat, BACKWARD=False, RELU=False, ADDED=False
        )
        statistics = kind.statistics(partial_sums, flat, weight, bias)
        out, added = empty_channels_last(x, x.shape), summand is not None
        given = flat if summand is None else _channels_last(summand)
        _apply(
            kind,
            flat,
            flat,
            statistics,
            statistics,
            statistics,
            given,
            out,
            BACKWARD=False,
            RELU=relu,
            ADDED=added,
        )
        ctx.save_for_backward(flat, statistics, out if added else None)
        ctx.shape, ctx.kind, ctx.relu, ctx.params, ctx.visits = (
            last.shape,
            kind,
            relu,
            params,
            len(weight),
        )
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)  # an absent gradient stays None
        return out, statistics

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        flat, statistics, output = ctx.saved_tensors
        added, relu = output is not None, ctx.relu and output is None
        grad = _channels_last(grad_output)
        masked_grad = torch.empty_like(grad) if added else grad
        given = _channels_last(output) if added else flat
        partial_sums = _reduce(
            ctx.kind,
            flat,
            grad,
            statistics,
            given,
            masked_grad,
            BACKWARD=True,
            RELU=relu,
            ADDED=added,
        )
        buffers = [
            param.grad_buffer() if param is not None and needed else None
            for param, needed in zip(ctx.params, ctx.needs_input_grad[1:3], strict=True)
        ]
        shape = ctx.visits, flat.shape[2]
        grads = [
            torch.empty(shape, device=flat.device) if buffer is None else buffer
            for buffer in buffers
        ]
        b, d = ctx.kind.input_grad_terms(partial_sums, flat.shape[1], statistics, *grads)
        out = torch.empty_like(flat)
        _apply(
            ctx.kind,
            flat,
            masked_grad,
            statistics,
            b,
            d,
            flat,
            out,
            BACKWARD=True,
            RELU=relu,
            ADDED=False,
        )
        returned = [
            grad if buffer is None else None for grad, buffer in zip(grads, buffers, strict=True)
        ]
        summand = masked_grad.movedim(-1, 1) if added else None
        return out.reshape(ctx.shape).movedim(-1, 1), *returned, None, None, None, summand


def _channels_last(images: Tensor) -> Tensor:
    """Activations [N, C, ...] with channels last, contiguous."""
    return images.movedim(1, -1).contiguous()
