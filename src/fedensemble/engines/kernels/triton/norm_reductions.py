"""The two passes of a norm over the activations of J visits, in channels-last format.

y = (x - mean) / sqrt(var + eps) * weight_jc + bias_jc. Rows are divided into sets with their own
statistics per channel: BatchNorm has one set per visit, GroupNorm one per example.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def locate(INNER, C, BLOCK_C: tl.constexpr, FLAT: tl.constexpr):
    """A program's set, the number of sets, its channels, and its index among INNER programs.

    FLAT: all programs lie on the first axis of the grid, in the same order. The other axes end at
    65535, but need no division.
    """
    inner, part, j, sets = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    if FLAT:
        number, parts = inner, tl.cdiv(C, BLOCK_C)
        inner, part = number % INNER, (number // INNER) % parts
        j, sets = number // (INNER * parts), tl.num_programs(0) // (INNER * parts)
    return j.to(tl.int64), sets, part * BLOCK_C + tl.arange(0, BLOCK_C), inner


@triton.jit  # type: ignore[untyped-decorator]
def reduce_channels(
    x,
    grad_output,
    mean,
    factor,
    shift,
    output,
    masked_grad,
    out,
    ROWS,
    C,
    SPLIT_ROWS,
    BACKWARD: tl.constexpr,
    RELU: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Per-channel sums over a split of a set's rows.

    Forward: of x - x_0 and its square, where x_0 is the set's first row; squares of values far from
    0 would cancel. BACKWARD: of grad_output and grad_output * (x - mean). With RELU the gradient
    counts only where the ReLU's input, factor x + shift, is positive. With ADDED the ReLU's input
    was a sum: the gradient counts where the ReLU's `output` is positive, and the masked gradient is
    stored.
    """
    j, sets, c, split = locate(tl.cdiv(ROWS, SPLIT_ROWS), C, BLOCK_C, FLAT)
    real = c < C
    x += j * ROWS * C
    grad_output += j * ROWS * C
    pivot = tl.load((mean + j * C + c) if BACKWARD else (x + c), mask=real, other=0.0).to(
        tl.float32
    )[None, :]
    if RELU:
        times = tl.load(factor + j * C + c, mask=real, other=0.0)[None, :]
        plus = tl.load(shift + j * C + c, mask=real, other=0.0)[None, :]
    # One sum per thread, so that threads exchange values only once, at the end.
    first = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(split * SPLIT_ROWS, min((split + 1) * SPLIT_ROWS, ROWS), BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        inside = (rows < min((split + 1) * SPLIT_ROWS, ROWS))[:, None] & real[None, :]
        at = rows[:, None] * C + c[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        distance = tl.where(inside, value - pivot, 0.0)
        if BACKWARD:
            grad = tl.load(grad_output + at, mask=inside, other=0.0).to(tl.float32)
            if RELU:
                grad = tl.where(times * value + plus > 0, grad, 0.0)
            if ADDED:
                given = tl.load(output + j * ROWS * C + at, mask=inside, other=0.0)
                grad = tl.where(given > 0, grad, 0.0)
                tl.store(
                    masked_grad + j * ROWS * C + at,
                    grad.to(masked_grad.dtype.element_ty),
                    mask=inside,
                )
            first += grad
            second += grad * distance
        else:
            first += distance
            second += distance * distance
    place = out + ((split * sets + j) * 2) * C + c
    tl.store(place, tl.sum(first, 0), mask=real)
    tl.store(place + C, tl.sum(second, 0), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def apply_affine(
    x,
    grad_output,
    factor,
    shift,
    b,
    d,
    summand,
    out,
    ROWS,
    C,
    BACKWARD: tl.constexpr,
    RELU: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Out = factor x + shift (+ summand if ADDED); BACKWARD: out = factor grad_output + b x + d.

    All coefficients are per set and channel.
    """
    j, _, c, block = locate(tl.cdiv(ROWS, BLOCK_R), C, BLOCK_C, FLAT)
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    real = c < C
    inside = (rows < ROWS)[:, None] & real[None, :]
    at = j * ROWS * C + rows[:, None] * C + c[None, :]
    number = j * C + c
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    times = tl.load(factor + number, mask=real, other=0.0)[None, :]
    if RELU or not BACKWARD:
        made = times * value + tl.load(shift + number, mask=real, other=0.0)[None, :]
    if BACKWARD:
        grad = tl.load(grad_output + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            grad = tl.where(made > 0, grad, 0.0)
        value = times * grad + (
            tl.load(b + number, mask=real, other=0.0)[None, :] * value
            + tl.load(d + number, mask=real, other=0.0)[None, :]
        )
    else:
        if ADDED:
            made += tl.load(summand + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(made < 0, 0.0, made) if RELU else made  # NaN stays NaN
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
