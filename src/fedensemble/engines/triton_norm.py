"""BatchNorm with J sets of statistics, and the sum and the ReLU after it: two passes over the images each way.

Between the passes one small launch makes all numbers by visit and channel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .pieces import Piece
from .triton_norm_passes import apply, slopes, statistics, sums
from .triton_tools import images_like


def _tile(channels: int, size: int, most: int) -> dict[str, int]:
    """Rows and at most `most` channels that a program takes at once, `size` numbers in all."""
    block_c = max(8, min(most, triton.next_power_of_2(channels)))
    return {"BLOCK_R": size // block_c, "BLOCK_C": block_c}


def _shares(rows: int, channels: int, visits: int, tile: dict[str, int]) -> tuple[int, int]:
    """Into how many shares a visit's rows are cut for sums, and their length."""
    blocks = triton.cdiv(rows, tile["BLOCK_R"])
    wanted = min(_SHARES, max(1, _PROGRAMS // (visits * triton.cdiv(channels, tile["BLOCK_C"]))))
    each = triton.cdiv(blocks, wanted)
    return triton.cdiv(blocks, each), each * tile["BLOCK_R"]


def _grid(rows: int, channels: int, visits: int, tile: dict[str, int]) -> tuple[int, int, int]:
    return triton.cdiv(rows, tile["BLOCK_R"]), triton.cdiv(channels, tile["BLOCK_C"]), visits


# By a search on an H200, which so many programs fill:
_SUMS, _APPLY = (1024, 32), (2048, 64)
_PROGRAMS = 1024
_SHARES = 128  # which one program can still add up at once


class StackedBatchNorm(torch.autograd.Function):
    """Normalised images, and numbers by visit and channel, [6, J, C], as `statistics` makes them.

    Args:
        x: [J * B, C, ...].
        weight, bias: [J, C], float32.
        mean, variance: running statistics, [J, C].
        relu: whether a ReLU is part of it.
        pieces: of weight and bias.
        more: what is added before the ReLU, shaped like x, or None.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float, momentum: float,
        relu: bool, pieces: tuple[Piece | None, Piece | None], more: Tensor | None = None,
    ) -> Any:  # fmt: skip
        visits, channels = weight.shape
        last = _lasting(x)
        flat = last.reshape(visits, -1, channels)
        rows = flat.shape[1]
        tile, wide = _tile(channels, *_SUMS), _tile(channels, *_APPLY)
        split, share = _shares(rows, channels, visits, tile)
        found = torch.empty(split, visits, 2, channels, dtype=torch.float32, device=x.device)
        known = torch.empty(6, visits, channels, dtype=torch.float32, device=x.device)
        out = images_like(x, x.shape)
        parts = triton.cdiv(channels, tile["BLOCK_C"])
        sums[(split, parts, visits)](
            flat, flat, known, known, known, flat, flat, found, rows, channels, share, BACK=False, RELU=False,
            ADDED=False, **tile,
        )  # fmt: skip
        statistics[(parts, visits)](
            found, flat, mean, variance, weight, bias, known, rows, channels, split, mean.stride(0), variance.stride(0),
            weight.stride(0), bias.stride(0), eps, momentum,
            SHARES=triton.next_power_of_2(split), BLOCK_C=tile["BLOCK_C"],
        )  # fmt: skip
        apply[_grid(rows, channels, visits, wide)](
            flat, flat, known[2], known[3], known, known, known, flat if more is None else _lasting(more), out, rows,
            channels, BACK=False, RELU=relu, ADDED=more is not None, **wide,
        )  # fmt: skip
        ctx.save_for_backward(flat, weight, known, None if more is None else out)
        ctx.shape, ctx.relu, ctx.pieces = last.shape, relu, pieces
        ctx.mark_non_differentiable(known)
        ctx.set_materialize_grads(False)  # no zeros for a slope that there is not
        return out, known

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Any) -> Any:
        flat, weight, known, done = ctx.saved_tensors
        visits, rows, channels = flat.shape
        tile, wide = _tile(channels, *_SUMS), _tile(channels, *_APPLY)
        split, share = _shares(rows, channels, visits, tile)
        added, relu = done is not None, ctx.relu and done is None
        along = _lasting(slope)
        kept = torch.empty_like(along) if added else along  # where the ReLU let something through
        found = torch.empty(split, visits, 2, channels, dtype=torch.float32, device=flat.device)
        numbers = torch.empty(3, visits, channels, dtype=torch.float32, device=flat.device)
        out = torch.empty_like(flat)
        parts = triton.cdiv(channels, tile["BLOCK_C"])
        sums[(split, parts, visits)](
            flat, along, known, known[2], known[3], _lasting(done) if added else flat, kept, found, rows, channels,
            share, BACK=True, RELU=relu, ADDED=added, **tile,
        )  # fmt: skip
        written = [
            piece.place() if piece is not None and needed else None
            for piece, needed in zip(ctx.pieces, ctx.needs_input_grad[1:3], strict=True)
        ]
        places = [torch.empty(weight.shape, device=weight.device) if place is None else place for place in written]
        slopes[(parts, visits)](
            found, weight, known, numbers, *places, rows, channels, split, weight.stride(0), places[0].stride(0),
            places[1].stride(0), SHARES=triton.next_power_of_2(split), BLOCK_C=tile["BLOCK_C"],
        )  # fmt: skip
        apply[_grid(rows, channels, visits, wide)](
            flat, kept, known[2], known[3], *numbers, flat, out, rows, channels, BACK=True, RELU=relu, ADDED=False,
            **wide,
        )  # fmt: skip
        brought = [place if before is None else None for place, before in zip(places, written, strict=True)]
        return out.reshape(ctx.shape).movedim(-1, 1), *brought, *[None] * 6, kept.movedim(-1, 1) if added else None


def _lasting(images: Tensor) -> Tensor:
    """Images [N, C, ...] with their channels last."""
    return images.movedim(1, -1).contiguous()
