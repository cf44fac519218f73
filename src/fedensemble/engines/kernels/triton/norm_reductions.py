"""The passes of norms over the images of J visits, channels last, as Triton kernels.

y = (x - mean) / sqrt(var + eps) * weight_jc + bias_jc. Rows are cut into sets with numbers of their
own by channel: BatchNorm has a set a visit, GroupNorm a set an example.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def whose(INNER, C, BLOCK_C: tl.constexpr, FLAT: tl.constexpr):
    """A program's set, the number of sets, its channels, and which of the INNER programs it is that
    share those.

    FLAT, all lie on the grid's first axis, in the same order: the others end at 65535, but need no
    division.
    """
    inner, part, j, sets = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    if FLAT:
        number, parts = inner, tl.cdiv(C, BLOCK_C)
        inner, part = number % INNER, (number // INNER) % parts
        j, sets = number // (INNER * parts), tl.num_programs(0) // (INNER * parts)
    return j.to(tl.int64), sets, part * BLOCK_C + tl.arange(0, BLOCK_C), inner


@triton.jit  # type: ignore[untyped-decorator]
def sums(
    x,
    slope,
    mean,
    factor,
    shift,
    done,
    kept,
    out,
    ROWS,
    C,
    SHARE,
    BACK: tl.constexpr,
    RELU: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Sums by channel over a share of a set's rows: of x - x_0 and its square, or of slope and
    slope * (x - mean).

    About the set's first row x_0, for squares of numbers far from 0 would cancel. With RELU, the
    slope counts where factor x + shift, which the ReLU was given, is positive. With ADDED the ReLU
    was given a sum: the slope counts where what it gave, `done`, is positive, and what counts goes
    to `kept`.
    """
    j, sets, c, split = whose(tl.cdiv(ROWS, SHARE), C, BLOCK_C, FLAT)
    real = c < C
    x += j * ROWS * C
    slope += j * ROWS * C
    about = tl.load((mean + j * C + c) if BACK else (x + c), mask=real, other=0.0).to(tl.float32)[
        None, :
    ]
    if RELU:
        times = tl.load(factor + j * C + c, mask=real, other=0.0)[None, :]
        plus = tl.load(shift + j * C + c, mask=real, other=0.0)[None, :]
    # a sum a thread: one exchange between them, at the end
    first = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(split * SHARE, min((split + 1) * SHARE, ROWS), BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        inside = (rows < min((split + 1) * SHARE, ROWS))[:, None] & real[None, :]
        at = rows[:, None] * C + c[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        far = tl.where(inside, value - about, 0.0)
        if BACK:
            along = tl.load(slope + at, mask=inside, other=0.0).to(tl.float32)
            if RELU:
                along = tl.where(times * value + plus > 0, along, 0.0)
            if ADDED:
                given = tl.load(done + j * ROWS * C + at, mask=inside, other=0.0)
                along = tl.where(given > 0, along, 0.0)
                tl.store(kept + j * ROWS * C + at, along.to(kept.dtype.element_ty), mask=inside)
            first += along
            second += along * far
        else:
            first += far
            second += far * far
    place = out + ((split * sets + j) * 2) * C + c
    tl.store(place, tl.sum(first, 0), mask=real)
    tl.store(place + C, tl.sum(second, 0), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def apply(
    x,
    slope,
    factor,
    shift,
    b,
    d,
    more,
    out,
    ROWS,
    C,
    BACK: tl.constexpr,
    RELU: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Out = factor x + shift, ADDED also + more, or out = factor slope + b x + d, with numbers by
    set and channel.
    """
    j, _, c, block = whose(tl.cdiv(ROWS, BLOCK_R), C, BLOCK_C, FLAT)
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    real = c < C
    inside = (rows < ROWS)[:, None] & real[None, :]
    at = j * ROWS * C + rows[:, None] * C + c[None, :]
    number = j * C + c
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    times = tl.load(factor + number, mask=real, other=0.0)[None, :]
    if RELU or not BACK:
        made = times * value + tl.load(shift + number, mask=real, other=0.0)[None, :]
    if BACK:
        along = tl.load(slope + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            along = tl.where(made > 0, along, 0.0)
        value = times * along + (
            tl.load(b + number, mask=real, other=0.0)[None, :] * value
            + tl.load(d + number, mask=real, other=0.0)[None, :]
        )
    else:
        if ADDED:
            made += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(made < 0, 0.0, made) if RELU else made  # keeps what is not a number
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
