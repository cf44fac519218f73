"""A GRU layer of J visits: one kernel launch per time step, matmul and cell together.

r, z = sigmoid of gate_inputs + W h;   n = tanh(gate_inputs + r (W h + b));   h <- (1 - z) n + z h.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .lstm import launch, tanh


@triton.jit(do_not_specialize=["t"])  # type: ignore[untyped-decorator]
def _forward_step(
    gate_inputs,
    weight,
    bias,
    hidden,
    outputs,
    gates,
    t,
    B,
    T,
    N,
    H,
    BIAS_STRIDE,
    FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Time step t for some units of some examples of a visit: their gates and outputs."""
    j = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    example = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    n = j * B + example
    before = (hidden + n * H) if FIRST else (outputs + (n * T + t - 1) * H)
    weight += j * 3 * H * H
    r = tl.zeros((BLOCK_B, BLOCK_U), dtype=tl.float32)
    z, new = r, r
    for first in range(0, H, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        state = tl.load(
            before[:, None] + k[None, :], mask=(example < B)[:, None] & (k < H)[None, :], other=0.0
        )
        there = weight + unit[:, None] * H + k[None, :]  # [U, K], of the first gate
        real = (unit < H)[:, None] & (k < H)[None, :]
        r = tl.dot(
            state, tl.trans(tl.load(there, mask=real, other=0.0)), r, input_precision=PRECISION
        )
        z = tl.dot(
            state,
            tl.trans(tl.load(there + H * H, mask=real, other=0.0)),
            z,
            input_precision=PRECISION,
        )
        new = tl.dot(
            state,
            tl.trans(tl.load(there + 2 * H * H, mask=real, other=0.0)),
            new,
            input_precision=PRECISION,
        )
    if HAS_BIAS:
        new += tl.load(bias + j * BIAS_STRIDE + unit, mask=unit < H, other=0.0)[None, :]
    inside = (example < B)[:, None] & (unit < H)[None, :]
    at = gate_inputs + ((n * T + t) * 3 * H)[:, None] + unit[None, :]
    r = tl.sigmoid(r + tl.load(at, mask=inside, other=0.0))
    z = tl.sigmoid(z + tl.load(at + H, mask=inside, other=0.0))
    candidate = tanh(r * new + tl.load(at + 2 * H, mask=inside, other=0.0))
    last = tl.load(before[:, None] + unit[None, :], mask=inside, other=0.0)
    now = outputs + ((n * T + t) * H)[:, None] + unit[None, :]
    tl.store(now, (1 - z) * candidate + z * last, mask=inside)
    saved = gates + ((n * T + t) * 4 * H)[:, None] + unit[None, :]
    tl.store(saved, r, mask=inside)
    tl.store(saved + H, z, mask=inside)
    tl.store(saved + 2 * H, candidate, mask=inside)
    tl.store(saved + 3 * H, new, mask=inside)


@triton.jit(do_not_specialize=["t"])  # type: ignore[untyped-decorator]
def _backward_step(
    grad_outputs,
    weight,
    hidden,
    outputs,
    gates,
    carried,
    grad_gates,
    t,
    B,
    T,
    N,
    H,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradients of time step t's gates from those of t + 1.

    `grad_gates` [N, T, 4H] has r, z, and n as the hidden state and as the input enter it.
    `carried`, what passes by the gates through z, is updated in place.
    """
    j = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    example = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    n = j * B + example
    inside = (example < B)[:, None] & (unit < H)[None, :]
    grad = tl.load(
        grad_outputs + ((n * T + t) * H)[:, None] + unit[None, :], mask=inside, other=0.0
    )
    place = carried + (n * H)[:, None] + unit[None, :]
    if not LAST:
        grad += tl.load(place, mask=inside, other=0.0)
        weight += j * 3 * H * H
        after = grad_gates + (n * T + t + 1) * 4 * H
        for first in range(0, 3 * H, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            grad_after = tl.load(
                after[:, None] + k[None, :],
                mask=(example < B)[:, None] & (k < 3 * H)[None, :],
                other=0.0,
            )
            real = (k < 3 * H)[:, None] & (unit < H)[None, :]
            matrix = tl.load(weight + k[:, None] * H + unit[None, :], mask=real, other=0.0)
            grad = tl.dot(grad_after, matrix, grad, input_precision=PRECISION)
    saved = gates + ((n * T + t) * 4 * H)[:, None] + unit[None, :]
    r = tl.load(saved, mask=inside, other=0.0)
    z = tl.load(saved + H, mask=inside, other=0.0)
    candidate = tl.load(saved + 2 * H, mask=inside, other=0.0)
    new = tl.load(saved + 3 * H, mask=inside, other=0.0)
    before = (hidden + n * H) if FIRST else (outputs + (n * T + t - 1) * H)
    last = tl.load(before[:, None] + unit[None, :], mask=inside, other=0.0)
    tl.store(place, grad * z, mask=inside)
    inner = grad * (1 - z) * (1 - candidate * candidate)
    out = grad_gates + ((n * T + t) * 4 * H)[:, None] + unit[None, :]
    tl.store(out, inner * new * r * (1 - r), mask=inside)
    tl.store(out + H, grad * (last - candidate) * z * (1 - z), mask=inside)
    tl.store(out + 2 * H, inner * r, mask=inside)
    tl.store(out + 3 * H, inner, mask=inside)


class TritonGRU(torch.autograd.Function):
    """Outputs [N, T, H] of one direction of one layer, N = J * B.

    Args:
        gate_inputs: what the inputs add to the gates, [N, T, 3H], with the biases of r and z.
        hidden: the initial state, [N, H].
        weight: of the state, [J, 3H, H].
        bias: what r is multiplied with in n, next to the state, [J, H]; or None.
    """

    @staticmethod
    def forward(
        ctx: Any, gate_inputs: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        gate_inputs, hidden, weight = (
            gate_inputs.contiguous(),
            hidden.contiguous(),
            weight.contiguous(),
        )
        total, steps, width = *gate_inputs.shape[:2], weight.shape[2]
        batch = total // len(weight)
        grid, tiles = launch(len(weight), batch, width)
        outputs = gate_inputs.new_empty(total, steps, width)
        gates = gate_inputs.new_empty(total, steps, 4 * width)
        for t in range(steps):
            _forward_step[grid](
                gate_inputs,
                weight,
                weight if bias is None else bias,
                hidden,
                outputs,
                gates,
                t,
                batch,
                steps,
                total,
                width,
                0 if bias is None else bias.stride(0),
                FIRST=t == 0,
                HAS_BIAS=bias is not None,
                **tiles,
            )
        ctx.save_for_backward(weight, hidden, outputs, gates)
        ctx.has_bias = bias is not None
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> Any:
        weight, hidden, outputs, gates = ctx.saved_tensors
        total, steps, width = outputs.shape
        visits = len(weight)
        grid, tiles = launch(visits, total // visits, width)
        grad_outputs, carried = grad_outputs.contiguous(), torch.empty_like(hidden)
        grad_gates = torch.empty_like(gates)
        for t in reversed(range(steps)):
            _backward_step[grid](
                grad_outputs,
                weight,
                hidden,
                outputs,
                gates,
                carried,
                grad_gates,
                t,
                total // visits,
                steps,
                total,
                width,
                FIRST=t == 0,
                LAST=t == steps - 1,
                **tiles,
            )
        of_state = grad_gates[..., : 3 * width].reshape(visits, -1, 3 * width)
        first = grad_gates[:, 0, : 3 * width].reshape(visits, -1, 3 * width)
        grad_hidden = torch.baddbmm(carried.reshape(visits, -1, width), first, weight)
        before = torch.cat([hidden.unsqueeze(1), outputs[:, :-1]], 1).reshape(visits, -1, width)
        grad_weight = torch.bmm(of_state.transpose(1, 2), before)
        grad_bias = of_state[..., 2 * width :].sum(1) if ctx.has_bias else None
        grad_inputs = torch.cat([grad_gates[..., : 2 * width], grad_gates[..., 3 * width :]], -1)
        return grad_inputs, grad_hidden.reshape(hidden.shape), grad_weight, grad_bias
