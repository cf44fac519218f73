"""Norms of J visits, and the sum and the ReLU after them: two passes over the images each way.

Between the passes small launches make all numbers by set and channel: those of BatchNorm or of
GroupNorm.
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
from .norm_reductions import apply, sums
from .tiling import images_like

Kind = BatchNorm | GroupNorm
# By a search on an H200: numbers and at most so many channels that a program takes at once, and its
# warps.
_SUMS, _APPLY = (1024, 32, 4), (4096, 64, 2)
# where an example, a set of GroupNorm, has few rows:
_SUMS_OF_FEW, _APPLY_TO_FEW = (2048, 128, 1), (2048, 128, 2)
_FEW = 256, 64
_PROGRAMS = 1024  # which fill it
_SHARES = 128  # which one program can still add up at once
_AXIS = 65535  # programs on a grid's second and third axis


def _tile(flat: Tensor, size: int, most: int, warps: int) -> dict[str, int]:
    """Rows and channels that a program takes at once."""
    sets, _, channels = flat.shape
    block_c = min(most, max(8, triton.next_power_of_2(channels)))
    flat_grid = max(sets, triton.cdiv(channels, block_c)) > _AXIS
    return {"BLOCK_R": size // block_c, "BLOCK_C": block_c, "FLAT": flat_grid, "num_warps": warps}


def _grid(inner: int, flat: Tensor, tile: dict[str, int]) -> tuple[int, ...]:
    """Programs: `inner` for each set and block of channels."""
    grid = inner, triton.cdiv(flat.shape[2], tile["BLOCK_C"]), len(flat)
    return (math.prod(grid),) if tile["FLAT"] else grid


def _shares(flat: Tensor, tile: dict[str, int]) -> tuple[int, int]:
    """Into how many shares a set's rows are cut for sums, and their length."""
    sets, rows, channels = flat.shape
    blocks = triton.cdiv(rows, tile["BLOCK_R"])
    wanted = min(_SHARES, max(1, _PROGRAMS // (sets * triton.cdiv(channels, tile["BLOCK_C"]))))
    each = triton.cdiv(blocks, wanted)
    return triton.cdiv(blocks, each), each * tile["BLOCK_R"]


def _first(
    kind: Kind,
    flat: Tensor,
    slope: Tensor,
    known: Tensor | None,
    done: Tensor,
    kept: Tensor,
    **what: bool,
) -> Tensor:
    """The first pass: two sums by set and channel, in shares, [shares, S, 2, C]; see `sums`."""
    sets, rows, channels = flat.shape
    few = isinstance(kind, GroupNorm) and rows <= _FEW[0]
    tile = _tile(flat, *(_SUMS_OF_FEW if few else _SUMS))
    split, share = _shares(flat, tile)
    found = torch.empty(split, sets, 2, channels, dtype=torch.float32, device=flat.device)
    mean, factor, shift = (found,) * 3 if known is None else (known[0], known[2], known[3])
    sums[_grid(split, flat, tile)](
        flat, slope, mean, factor, shift, done, kept, found, rows, channels, share, **what, **tile
    )
    return found


def _second(
    kind: Kind,
    flat: Tensor,
    slope: Tensor,
    known: Tensor,
    b: Tensor,
    d: Tensor,
    more: Tensor,
    out: Tensor,
    **what: bool,
) -> None:
    """The second pass: writes images or their slope to `out`; see `apply`."""
    _, rows, channels = flat.shape
    few = isinstance(kind, GroupNorm) and rows < _FEW[1]
    tile = _tile(flat, *(_APPLY_TO_FEW if few else _APPLY))
    apply[_grid(triton.cdiv(rows, tile["BLOCK_R"]), flat, tile)](
        flat, slope, known[2], known[3], b, d, more, out, rows, channels, **what, **tile
    )


class StackedNorm(torch.autograd.Function):
    """Normalised images, and numbers by set and channel, [4 or more, S, C], as the kind of norm
    makes them.

    Args:
        x: [J * B, C, ...].
        weight, bias: [J, C], float32.
        kind: of norm, with what only that one needs.
        relu: whether a ReLU is part of it.
        pieces: of weight and bias.
        more: what is added before the ReLU, shaped like x, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        kind: Kind,
        relu: bool,
        pieces: tuple[StackedParam | None, StackedParam | None],
        more: Tensor | None = None,
    ) -> Any:
        last = _lasting(x)
        flat = last.reshape(kind.sets(len(weight), len(x)), -1, x.shape[1])
        found = _first(kind, flat, flat, None, flat, flat, BACK=False, RELU=False, ADDED=False)
        known = kind.known(found, flat, weight, bias)
        out, added = images_like(x, x.shape), more is not None
        given = flat if more is None else _lasting(more)
        _second(
            kind, flat, flat, known, known, known, given, out, BACK=False, RELU=relu, ADDED=added
        )
        ctx.save_for_backward(flat, known, out if added else None)
        ctx.shape, ctx.kind, ctx.relu, ctx.pieces, ctx.visits = (
            last.shape,
            kind,
            relu,
            pieces,
            len(weight),
        )
        ctx.mark_non_differentiable(known)
        ctx.set_materialize_grads(False)  # no zeros for a slope that there is not
        return out, known

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Any) -> Any:
        flat, known, done = ctx.saved_tensors
        added, relu = done is not None, ctx.relu and done is None
        along = _lasting(slope)
        kept = torch.empty_like(along) if added else along  # where the ReLU let something through
        given = _lasting(done) if added else flat
        found = _first(ctx.kind, flat, along, known, given, kept, BACK=True, RELU=relu, ADDED=added)
        written = [
            piece.grad_buffer() if piece is not None and needed else None
            for piece, needed in zip(ctx.pieces, ctx.needs_input_grad[1:3], strict=True)
        ]
        room = ctx.visits, flat.shape[2]
        places = [
            torch.empty(room, device=flat.device) if place is None else place for place in written
        ]
        b, d = ctx.kind.slopes(found, flat.shape[1], known, *places)
        out = torch.empty_like(flat)
        _second(ctx.kind, flat, kept, known, b, d, flat, out, BACK=True, RELU=relu, ADDED=False)
        brought = [
            place if before is None else None for place, before in zip(places, written, strict=True)
        ]
        summand = kept.movedim(-1, 1) if added else None
        return out.reshape(ctx.shape).movedim(-1, 1), *brought, None, None, None, summand


def _lasting(images: Tensor) -> Tensor:
    """Images [N, C, ...] with their channels last."""
    return images.movedim(1, -1).contiguous()
