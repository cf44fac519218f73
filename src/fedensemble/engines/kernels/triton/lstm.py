"""An LSTM layer with J sets of weights as Triton kernels: one launch a time step, product and cell
together.

i, f, o = sigmoid and g = tanh of given + W h;   c <- f c + i g;   h <- o tanh(c).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiling import precision, tile

_PROGRAMS = 264  # two for each of a large card's processors


@triton.jit  # type: ignore[untyped-decorator]
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit(do_not_specialize=["t"])  # type: ignore[untyped-decorator]
def _ahead(
    given,
    weight,
    hidden,
    outputs,
    cells,
    gates,
    t,
    B,
    T,
    N,
    H,
    FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Time step t for some units of some examples of a visit: their gates, cells and outputs."""
    j = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    example = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    n = j * B + example
    before = (hidden + n * H) if FIRST else (outputs + (n * T + t - 1) * H)
    weight += j * 4 * H * H
    i = tl.zeros((BLOCK_B, BLOCK_U), dtype=tl.float32)
    f, g, o = i, i, i
    for first in range(0, H, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        state = tl.load(
            before[:, None] + k[None, :], mask=(example < B)[:, None] & (k < H)[None, :], other=0.0
        )
        there = weight + unit[:, None] * H + k[None, :]  # [U, K], of the first gate
        real = (unit < H)[:, None] & (k < H)[None, :]
        i = tl.dot(
            state, tl.trans(tl.load(there, mask=real, other=0.0)), i, input_precision=PRECISION
        )
        f = tl.dot(
            state,
            tl.trans(tl.load(there + H * H, mask=real, other=0.0)),
            f,
            input_precision=PRECISION,
        )
        g = tl.dot(
            state,
            tl.trans(tl.load(there + 2 * H * H, mask=real, other=0.0)),
            g,
            input_precision=PRECISION,
        )
        o = tl.dot(
            state,
            tl.trans(tl.load(there + 3 * H * H, mask=real, other=0.0)),
            o,
            input_precision=PRECISION,
        )
    inside = (example < B)[:, None] & (unit < H)[None, :]
    at = given + ((n * T + t) * 4 * H)[:, None] + unit[None, :]
    i = tl.sigmoid(i + tl.load(at, mask=inside, other=0.0))
    f = tl.sigmoid(f + tl.load(at + H, mask=inside, other=0.0))
    g = _tanh(g + tl.load(at + 2 * H, mask=inside, other=0.0))
    o = tl.sigmoid(o + tl.load(at + 3 * H, mask=inside, other=0.0))
    cell = cells + ((t * N + n) * H)[:, None] + unit[None, :]  # [T + 1, N, H]
    c = f * tl.load(cell, mask=inside, other=0.0) + i * g
    tl.store(cell + N * H, c, mask=inside)
    tl.store(outputs + ((n * T + t) * H)[:, None] + unit[None, :], o * _tanh(c), mask=inside)
    kept = gates + ((n * T + t) * 4 * H)[:, None] + unit[None, :]
    tl.store(kept, i, mask=inside)
    tl.store(kept + H, f, mask=inside)
    tl.store(kept + 2 * H, g, mask=inside)
    tl.store(kept + 3 * H, o, mask=inside)


@triton.jit(do_not_specialize=["t"])  # type: ignore[untyped-decorator]
def _back(
    along_outputs,
    weight,
    cells,
    gates,
    along_cell,
    along_given,
    t,
    B,
    T,
    N,
    H,
    LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The slopes of time step t's gates from those of t + 1; `along_cell` goes from step to
    step.
    """
    j = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    example = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    n = j * B + example
    inside = (example < B)[:, None] & (unit < H)[None, :]
    along = tl.load(
        along_outputs + ((n * T + t) * H)[:, None] + unit[None, :], mask=inside, other=0.0
    )
    if not LAST:
        weight += j * 4 * H * H
        after = along_given + (n * T + t + 1) * 4 * H
        for first in range(0, 4 * H, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            slope = tl.load(
                after[:, None] + k[None, :],
                mask=(example < B)[:, None] & (k < 4 * H)[None, :],
                other=0.0,
            )
            real = (k < 4 * H)[:, None] & (unit < H)[None, :]
            matrix = tl.load(weight + k[:, None] * H + unit[None, :], mask=real, other=0.0)
            along = tl.dot(slope, matrix, along, input_precision=PRECISION)
    kept = gates + ((n * T + t) * 4 * H)[:, None] + unit[None, :]
    i = tl.load(kept, mask=inside, other=0.0)
    f = tl.load(kept + H, mask=inside, other=0.0)
    g = tl.load(kept + 2 * H, mask=inside, other=0.0)
    o = tl.load(kept + 3 * H, mask=inside, other=0.0)
    cell = cells + ((t * N + n) * H)[:, None] + unit[None, :]
    bent = _tanh(tl.load(cell + N * H, mask=inside, other=0.0))
    place = along_cell + (n * H)[:, None] + unit[None, :]
    c = tl.load(place, mask=inside, other=0.0) + along * o * (1 - bent * bent)
    tl.store(place, c * f, mask=inside)
    out = along_given + ((n * T + t) * 4 * H)[:, None] + unit[None, :]
    tl.store(out, c * g * i * (1 - i), mask=inside)
    tl.store(out + H, c * tl.load(cell, mask=inside, other=0.0) * f * (1 - f), mask=inside)
    tl.store(out + 2 * H, c * i * (1 - g * g), mask=inside)
    tl.store(out + 3 * H, along * bent * o * (1 - o), mask=inside)


def _launch(visits: int, batch: int, width: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """The grid and the tiles, from shapes alone."""
    block_b = tile(batch, 64)
    blocks = triton.cdiv(batch, block_b) * visits
    block_u = 32 if triton.cdiv(width, 32) * blocks >= _PROGRAMS else 16
    grid = (triton.cdiv(width, block_u), triton.cdiv(batch, block_b), visits)
    return grid, {
        "PRECISION": precision(),
        "BLOCK_B": block_b,
        "BLOCK_U": block_u,
        "BLOCK_K": tile(width, 64),
        "num_warps": 4,
        "num_stages": 3,
    }


class TritonLSTM(torch.autograd.Function):
    """As `LSTMLayer`, in float32."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> Any:
        given, hidden, weight = given.contiguous(), hidden.contiguous(), weight.contiguous()
        total, steps, width = *given.shape[:2], weight.shape[2]
        grid, tiles = _launch(len(weight), total // len(weight), width)
        outputs, gates = given.new_empty(total, steps, width), torch.empty_like(given)
        cells = given.new_empty(steps + 1, total, width)
        cells[0] = cell
        shape = (total // len(weight), steps, total, width)
        for t in range(steps):
            _ahead[grid](
                given, weight, hidden, outputs, cells, gates, t, *shape, FIRST=t == 0, **tiles
            )
        ctx.save_for_backward(weight, hidden, outputs, cells, gates)
        return outputs, cells[-1].clone()

    @staticmethod
    def backward(ctx: Any, along_outputs: Tensor, along_last: Tensor) -> Any:
        weight, hidden, outputs, cells, gates = ctx.saved_tensors
        total, steps, width = outputs.shape
        visits = len(weight)
        grid, tiles = _launch(visits, total // visits, width)
        along_outputs, along_cell = (
            along_outputs.contiguous(),
            along_last.clone(memory_format=torch.contiguous_format),
        )
        along_given = torch.empty_like(gates)
        shape = (total // visits, steps, total, width)
        for t in reversed(range(steps)):
            last = t == steps - 1
            _back[grid](
                along_outputs,
                weight,
                cells,
                gates,
                along_cell,
                along_given,
                t,
                *shape,
                LAST=last,
                **tiles,
            )
        first = along_given[:, 0].reshape(visits, -1, 4 * width)
        along_hidden = torch.bmm(first, weight).reshape(hidden.shape)
        before = torch.cat([hidden.unsqueeze(1), outputs[:, :-1]], 1).reshape(visits, -1, width)
        left = along_given.reshape(visits, -1, 4 * width).transpose(1, 2)
        return along_given, along_hidden, along_cell, torch.bmm(left, before)
