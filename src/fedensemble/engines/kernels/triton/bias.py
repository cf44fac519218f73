"""Biases of linear layers of J visits: rows that all hold the bias, and sums of rows.

torch copies a bias to the output of `baddbmm` element by element, and sums bf16 rows by a kernel
for any layout; each takes several times as long as reading or writing the memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiling import block_size

_TILE = 2048  # numbers of a tile
_PROGRAMS = 264  # two per multiprocessor of an H200
_FEWEST_ROWS = 256  # of a split


@triton.jit  # type: ignore[untyped-decorator]
def _fill(bias, out, N, O, BIAS_STRIDE, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """out[j, n, o] = bias[j, o]."""
    j = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    value = tl.load(bias + j * BIAS_STRIDE + o, mask=o < O, other=0.0).to(out.dtype.element_ty)
    tl.store(
        out + j * N * O + n[:, None] * O + o[None, :],
        tl.broadcast_to(value[None, :], (BLOCK_R, BLOCK_C)),
        mask=(n < N)[:, None] & (o < O)[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(
    x,
    out,
    N,
    O,
    SPLIT_ROWS,
    SPLIT_STRIDE,
    J_STRIDE,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out[s, j, o] = sum of x[j, n, o] over the rows n of split s."""
    split, j = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    x += j * N * O
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for first in range(split * SPLIT_ROWS, tl.minimum((split + 1) * SPLIT_ROWS, N), BLOCK_R):
        n = first + tl.arange(0, BLOCK_R)
        total += tl.load(
            x + n[:, None] * O + o[None, :], mask=(n < N)[:, None] & (o < O)[None, :], other=0.0
        ).to(tl.float32)
    tl.store(out + split * SPLIT_STRIDE + j * J_STRIDE + o, tl.sum(total, axis=0), mask=o < O)


def _tile(width: int) -> dict[str, Any]:
    columns = block_size(width, 64)
    return {"BLOCK_R": _TILE // columns, "BLOCK_C": columns, "num_warps": 4}


def repeat_bias(bias: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The bias of each visit, [J, O], for each of its rows: [J, rows, O] in `dtype`."""
    visits, width = bias.shape
    out = torch.empty(visits, rows, width, dtype=dtype, device=bias.device)
    tile = _tile(width)
    grid = (triton.cdiv(rows, tile["BLOCK_R"]), triton.cdiv(width, tile["BLOCK_C"]), visits)
    _fill[grid](bias, out, rows, width, bias.stride(0), **tile)
    return out


def sum_rows(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The sums of contiguous rows [J, n, O], [J, O] in float32.

    Args:
        out: where to write them; its rows may lie apart.
    """
    visits, rows, width = x.shape
    tile = _tile(width)
    columns = triton.cdiv(width, tile["BLOCK_C"])
    split = max(1, min(triton.cdiv(_PROGRAMS, visits * columns), rows // _FEWEST_ROWS))
    split_rows = triton.cdiv(triton.cdiv(rows, split), tile["BLOCK_R"]) * tile["BLOCK_R"]
    if out is None:
        out = torch.empty(visits, width, dtype=torch.float32, device=x.device)
    sums = out.unsqueeze(0) if split == 1 else out.new_empty(split, visits, width)
    _sum_rows[(columns, split, visits)](
        x, sums, rows, width, split_rows, sums.stride(0), sums.stride(1), **tile
    )
    return out if split == 1 else torch.sum(sums, 0, out=out)
