"""BatchNorm's passes over the images of J visits, channels last, as Triton kernels.

y = (x - mean_jc) / sqrt(var_jc + eps) * weight_jc + bias_jc, mean and variance over a visit's own batch and pixels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def sums(
    x, slope, mean, factor, shift, done, kept, out, ROWS, C, SHARE, BACK: tl.constexpr, RELU: tl.constexpr,
    ADDED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums by channel over a share of a visit's rows: of x - x_0 and its square, or of slope and slope * (x - mean).

    About the visit's first row x_0, for squares of numbers far from 0 would cancel. With RELU, the slope counts where
    factor x + shift, which the ReLU was given, is positive. With ADDED the ReLU was given a sum: the slope counts where
    what it gave, `done`, is positive, and what counts goes to `kept`.
    """
    j = tl.program_id(2).to(tl.int64)
    split = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = c < C
    x += j * ROWS * C
    slope += j * ROWS * C
    about = tl.load((mean + j * C + c) if BACK else (x + c), mask=real, other=0.0).to(tl.float32)[None, :]
    if RELU:
        times = tl.load(factor + j * C + c, mask=real, other=0.0)[None, :]
        plus = tl.load(shift + j * C + c, mask=real, other=0.0)[None, :]
    first = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)  # a sum a thread: one exchange between them, at the end
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
    place = out + ((split * tl.num_programs(2) + j) * 2) * C + c
    tl.store(place, tl.sum(first, 0), mask=real)
    tl.store(place + C, tl.sum(second, 0), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _total(sums, SPLIT, C, c, real, SHARES: tl.constexpr):
    """The two sums of a visit over all shares, of which there may be SHARES."""
    split = tl.arange(0, SHARES)[:, None]
    place = sums + (split * tl.num_programs(1) + tl.program_id(1)) * 2 * C + c[None, :]
    there = (split < SPLIT) & real[None, :]
    first, second = tl.load(place, mask=there, other=0.0), tl.load(place + C, mask=there, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit  # type: ignore[untyped-decorator]
def statistics(
    sums, x, mean, variance, weight, bias, out, ROWS, C, SPLIT, MEAN, VARIANCE, WEIGHT, BIAS, EPS, MOMENTUM,
    SHARES: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Out [6, J, C]: mean, 1 / deviation, the factor and shift of x, and the new running mean and variance.

    Rows of running mean and variance, weight and bias lie MEAN, VARIANCE, WEIGHT and BIAS apart.
    """
    j = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = c < C
    first, second = _total(sums, SPLIT, C, c, real, SHARES)
    near = first / ROWS
    centre = tl.load(x + j * ROWS * C + c, mask=real, other=0.0).to(tl.float32) + near
    var = tl.maximum(second / ROWS - near * near, 0.0)
    scale = 1.0 / tl.sqrt(var + EPS)
    factor = scale * tl.load(weight + j * WEIGHT + c, mask=real, other=0.0)
    place, each = out + j * C + c, tl.num_programs(1) * C
    tl.store(place, centre, mask=real)
    tl.store(place + each, scale, mask=real)
    tl.store(place + 2 * each, factor, mask=real)
    tl.store(place + 3 * each, tl.load(bias + j * BIAS + c, mask=real, other=0.0) - centre * factor, mask=real)
    old = tl.load(mean + j * MEAN + c, mask=real, other=0.0)
    spread = tl.load(variance + j * VARIANCE + c, mask=real, other=0.0)
    tl.store(place + 4 * each, (1 - MOMENTUM) * old + MOMENTUM * centre, mask=real)
    tl.store(place + 5 * each, (1 - MOMENTUM) * spread + MOMENTUM * (var * ROWS / (ROWS - 1)), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def slopes(
    sums, weight, known, out, along_weight, along_bias, ROWS, C, SPLIT, WEIGHT, ALONG_WEIGHT, ALONG_BIAS,
    SHARES: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Slopes of weight and bias, and out [3, J, C]: a, b and d of the images' slope, a slope + b x + d."""
    j = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = c < C
    total, weighted = _total(sums, SPLIT, C, c, real, SHARES)
    place, each = out + j * C + c, tl.num_programs(1) * C
    mean = tl.load(known + j * C + c, mask=real, other=0.0)
    scale = tl.load(known + each + j * C + c, mask=real, other=0.0)
    a = scale * tl.load(weight + j * WEIGHT + c, mask=real, other=0.0)
    b = -a * scale * scale * weighted / ROWS
    tl.store(along_weight + j * ALONG_WEIGHT + c, weighted * scale, mask=real)
    tl.store(along_bias + j * ALONG_BIAS + c, total, mask=real)
    tl.store(place, a, mask=real)
    tl.store(place + each, b, mask=real)
    tl.store(place + 2 * each, -a * total / ROWS - b * mean, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def apply(
    x, slope, factor, shift, a, b, d, more, out, ROWS, C, BACK: tl.constexpr, RELU: tl.constexpr, ADDED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Out = factor x + shift, ADDED also + more, or out = a slope + b x + d, with numbers by visit and channel."""
    j = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = c < C
    inside = (rows < ROWS)[:, None] & real[None, :]
    at = j * ROWS * C + rows[:, None] * C + c[None, :]
    number = j * C + c
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if RELU or not BACK:
        times = tl.load(factor + number, mask=real, other=0.0)[None, :]
        made = times * value + tl.load(shift + number, mask=real, other=0.0)[None, :]
    if BACK:
        along = tl.load(slope + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            along = tl.where(made > 0, along, 0.0)
        value = tl.load(a + number, mask=real, other=0.0)[None, :] * along + (
            tl.load(b + number, mask=real, other=0.0)[None, :] * value
            + tl.load(d + number, mask=real, other=0.0)[None, :]
        )
    else:
        if ADDED:
            made += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(made < 0, 0.0, made) if RELU else made  # keeps what is not a number
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
