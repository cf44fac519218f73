"""A plain RNN layer of J visits: one kernel launch per time step, matmul and activation together.

h <- tanh(inputs + W h), or the same with a ReLU.
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
    inputs,
    weight,
    hidden,
    outputs,
    t,
    B,
    T,
    H,
    FIRST: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Time step t for some units of some examples of a visit."""
    j = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    example = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    n = j * B + example
    before = (hidden + n * H) if FIRST else (outputs + (n * T + t - 1) * H)
    weight += j * H * H
    total = tl.zeros((BLOCK_B, BLOCK_U), dtype=tl.float32)
    for first in range(0, H, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        state = tl.load(
            before[:, None] + k[None, :], mask=(example < B)[:, None] & (k < H)[None, :], other=0.0
        )
        matrix = tl.load(
            weight + unit[:, None] * H + k[None, :],
            mask=(unit < H)[:, None] & (k < H)[None, :],
            other=0.0,
        )
        total = tl.dot(state, tl.trans(matrix), total, input_precision=PRECISION)
    inside = (example < B)[:, None] & (unit < H)[None, :]
    at = ((n * T + t) * H)[:, None] + unit[None, :]
    total += tl.load(inputs + at, mask=inside, other=0.0)
    tl.store(outputs + at, tl.maximum(total, 0.0) if RELU else tanh(total), mask=inside)


@triton.jit(do_not_specialize=["t"])  # type: ignore[untyped-decorator]
def _backward_step(
    grad_outputs,
    weight,
    outputs,
    grad_inputs,
    t,
    B,
    T,
    H,
    LAST: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradient of what goes into the activation at time step t, from that of t + 1."""
    j = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    example = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    n = j * B + example
    inside = (example < B)[:, None] & (unit < H)[None, :]
    at = ((n * T + t) * H)[:, None] + unit[None, :]
    grad = tl.load(grad_outputs + at, mask=inside, other=0.0)
    if not LAST:
        weight += j * H * H
        after = grad_inputs + (n * T + t + 1) * H
        for first in range(0, H, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            grad_after = tl.load(
                after[:, None] + k[None, :],
                mask=(example < B)[:, None] & (k < H)[None, :],
                other=0.0,
            )
            real = (k < H)[:, None] & (unit < H)[None, :]
            matrix = tl.load(weight + k[:, None] * H + unit[None, :], mask=real, other=0.0)
            grad = tl.dot(grad_after, matrix, grad, input_precision=PRECISION)
    out = tl.load(outputs + at, mask=inside, other=0.0)
    grad = tl.where(out > 0, grad, 0.0) if RELU else grad * (1 - out * out)
    tl.store(grad_inputs + at, grad, mask=inside)


class TritonRNN(torch.autograd.Function):
    """Outputs [N, T, H] of one direction of one layer, N = J * B.

    Args:
        inputs: what the inputs add, [N, T, H], biases included.
        hidden: the initial state, [N, H].
        weight: of the state, [J, H, H].
        relu: whether the activation is a ReLU; otherwise it is tanh.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, hidden: Tensor, weight: Tensor, relu: bool) -> Tensor:
        inputs, hidden, weight = inputs.contiguous(), hidden.contiguous(), weight.contiguous()
        total, steps, width = inputs.shape
        batch = total // len(weight)
        grid, tiles = launch(len(weight), batch, width)
        outputs = torch.empty_like(inputs)
        for t in range(steps):
            _forward_step[grid](
                inputs,
                weight,
                hidden,
                outputs,
                t,
                batch,
                steps,
                width,
                FIRST=t == 0,
                RELU=relu,
                **tiles,
            )
        ctx.save_for_backward(weight, hidden, outputs)
        ctx.relu = relu
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> Any:
        weight, hidden, outputs = ctx.saved_tensors
        total, steps, width = outputs.shape
        visits = len(weight)
        grid, tiles = launch(visits, total // visits, width)
        grad_outputs, grad_inputs = grad_outputs.contiguous(), torch.empty_like(outputs)
        for t in reversed(range(steps)):
            _backward_step[grid](
                grad_outputs,
                weight,
                outputs,
                grad_inputs,
                t,
                total // visits,
                steps,
                width,
                LAST=t == steps - 1,
                RELU=ctx.relu,
                **tiles,
            )
        first = grad_inputs[:, 0].reshape(visits, -1, width)
        grad_hidden = torch.bmm(first, weight).reshape(hidden.shape)
        before = torch.cat([hidden.unsqueeze(1), outputs[:, :-1]], 1).reshape(visits, -1, width)
        grad_weight = torch.bmm(grad_inputs.reshape(visits, -1, width).transpose(1, 2), before)
        return grad_inputs, grad_hidden, grad_weight, None
