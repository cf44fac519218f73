"""An LSTM layer of J visits: one kernel launch per time step, matmul and cell together.

i, f, o = sigmoid and g = tanh of gate_inputs + W h;   c <- f c + i g;   h <- o tanh(c).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiling import block_size, matmul_precision

_PROGRAMS = 264  # two per multiprocessor of an H200


@triton.jit  # type: ignore[untyped-decorator]
def tanh(x):
    """Triton has no tanh of its own on all devices."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit(do_not_specialize=["t"])  # type: ignore[untyped-decorator]
def _forward_step(
    gate_inputs,
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
    at = gate_inputs + ((n * T + t) * 4 * H)[:, None] + unit[None, :]
    i = tl.sigmoid(i + tl.load(at, mask=inside, other=0.0))
    f = tl.sigmoid(f + tl.load(at + H, mask=inside, other=0.0))
    g = tanh(g + tl.load(at + 2 * H, mask=inside, other=0.0))
    o = tl.sigmoid(o + tl.load(at + 3 * H, mask=inside, other=0.0))
    cell = cells + ((t * N + n) * H)[:, None] + unit[None, :]  # [T + 1, N, H]
    c = f * tl.load(cell, mask=inside, other=0.0) + i * g
    tl.store(cell + N * H, c, mask=inside)
    tl.store(outputs + ((n * T + t) * H)[:, None] + unit[None, :], o * tanh(c), mask=inside)
    saved = gates + ((n * T + t) * 4 * H)[:, None] + unit[None, :]
    tl.store(saved, i, mask=inside)
    tl.store(saved + H, f, mask=inside)
    tl.store(saved + 2 * H, g, mask=inside)
    tl.store(saved + 3 * H, o, mask=inside)


@triton.jit(do_not_specialize=["t"])  # type: ignore[untyped-decorator]
def _backward_step(
    grad_outputs,
    weight,
    cells,
    gates,
    grad_cell,
    grad_gates,
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
    """The gradients of time step t's gates from those of t + 1; `grad_cell` is updated in place."""
    j = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    example = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    n = j * B + example
    inside = (example < B)[:, None] & (unit < H)[None, :]
    grad = tl.load(
        grad_outputs + ((n * T + t) * H)[:, None] + unit[None, :], mask=inside, other=0.0
    )
    if not LAST:
        weight += j * 4 * H * H
        after = grad_gates + (n * T + t + 1) * 4 * H
        for first in range(0, 4 * H, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            grad_after = tl.load(
                after[:, None] + k[None, :],
                mask=(example < B)[:, None] & (k < 4 * H)[None, :],
                other=0.0,
            )
            real = (k < 4 * H)[:, None] & (unit < H)[None, :]
            matrix = tl.load(weight + k[:, None] * H + unit[None, :], mask=real, other=0.0)
            grad = tl.dot(grad_after, matrix, grad, input_precision=PRECISION)
    saved = gates + ((n * T + t) * 4 * H)[:, None] + unit[None, :]
    i = tl.load(saved, mask=inside, other=0.0)
    f = tl.load(saved + H, mask=inside, other=0.0)
    g = tl.load(saved + 2 * H, mask=inside, other=0.0)
    o = tl.load(saved + 3 * H, mask=inside, other=0.0)
    cell = cells + ((t * N + n) * H)[:, None] + unit[None, :]
    tanh_cell = tanh(tl.load(cell + N * H, mask=inside, other=0.0))
    place = grad_cell + (n * H)[:, None] + unit[None, :]
    c = tl.load(place, mask=inside, other=0.0) + grad * o * (1 - tanh_cell * tanh_cell)
    tl.store(place, c * f, mask=inside)
    out = grad_gates + ((n * T + t) * 4 * H)[:, None] + unit[None, :]
    tl.store(out, c * g * i * (1 - i), mask=inside)
    tl.store(out + H, c * tl.load(cell, mask=inside, other=0.0) * f * (1 - f), mask=inside)
    tl.store(out + 2 * H, c * i * (1 - g * g), mask=inside)
    tl.store(out + 3 * H, grad * tanh_cell * o * (1 - o), mask=inside)


def launch(visits: int, batch: int, width: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """The grid and the block sizes, from shapes alone."""
    block_b = block_size(batch, 64)
    blocks = triton.cdiv(batch, block_b) * visits
    block_u = 32 if triton.cdiv(width, 32) * blocks >= _PROGRAMS else 16
    grid = (triton.cdiv(width, block_u), triton.cdiv(batch, block_b), visits)
    return grid, {
        "PRECISION": matmul_precision(),
        "BLOCK_B": block_b,
        "BLOCK_U": block_u,
        "BLOCK_K": block_size(width, 64),
        "num_warps": 4,
        "num_stages": 3,
    }


class TritonLSTM(torch.autograd.Function):
    """Outputs [N, T, H] and the last cell [N, H] of one direction of one layer, N = J * B.

    The weight gradient is one matmul over all time steps; left to autograd, each time step would
    add its own [J, 4H, H] gradient to a sum, which took most of the time.

    Args:
        gate_inputs: what the inputs add to the gates, [N, T, 4H], biases included.
        hidden, cell: the initial state, [N, H].
        weight: of the state, [J, 4H, H].
    """

    @staticmethod
    def forward(ctx: Any, gate_inputs: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> Any:
        gate_inputs, hidden, weight = (
            gate_inputs.contiguous(),
            hidden.contiguous(),
            weight.contiguous(),
        )
        total, steps, width = *gate_inputs.shape[:2], weight.shape[2]
        grid, tiles = launch(len(weight), total // len(weight), width)
        outputs, gates = gate_inputs.new_empty(total, steps, width), torch.empty_like(gate_inputs)
        cells = gate_inputs.new_empty(steps + 1, total, width)
        cells[0] = cell
        shape = (total // len(weight), steps, total, width)
        for t in range(steps):
            _forward_step[grid](
                gate_inputs, weight, hidden, outputs, cells, gates, t, *shape, FIRST=t == 0, **tiles
            )
        ctx.save_for_backward(weight, hidden, outputs, cells, gates)
        return outputs, cells[-1].clone()

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor, grad_last: Tensor) -> Any:
        weight, hidden, outputs, cells, gates = ctx.saved_tensors
        total, steps, width = outputs.shape
        visits = len(weight)
        grid, tiles = launch(visits, total // visits, width)
        grad_outputs, grad_cell = (
            grad_outputs.contiguous(),
            grad_last.clone(memory_format=torch.contiguous_format),
        )
        grad_gates = torch.empty_like(gates)
        shape = (total // visits, steps, total, width)
        for t in reversed(range(steps)):
            last = t == steps - 1
            _backward_step[grid](
                grad_outputs,
                weight,
                cells,
                gates,
                grad_cell,
                grad_gates,
                t,
                *shape,
                LAST=last,
                **tiles,
            )
        first = grad_gates[:, 0].reshape(visits, -1, 4 * width)
        grad_hidden = torch.bmm(first, weight).reshape(hidden.shape)
        before = torch.cat([hidden.unsqueeze(1), outputs[:, :-1]], 1).reshape(visits, -1, width)
        left = grad_gates.reshape(visits, -1, 4 * width).transpose(1, 2)
        return grad_gates, grad_hidden, grad_cell, torch.bmm(left, before)
