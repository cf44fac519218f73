"""Passes over all weights of J visits, [J, P], as Triton kernels: a step of SGD, and the copy that products read.

Weights are gone through as one flat line, so that accesses are aligned whatever P is. Where slopes or the copy have
rows of another length than the weights, their places are worked out from the row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .kernels import STREAM


@triton.jit  # type: ignore[untyped-decorator]
def _places(WIDE, TOTAL, BLOCK: tl.constexpr):
    """Places on the line, whether they hold weights, and their rows; a block has parts of at most two."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    row = first // WIDE
    row = row + (at >= (row + 1) * WIDE).to(tl.int64)
    return at, at < TOTAL, row


@triton.jit  # type: ignore[untyped-decorator]
def _descend(
    theta, slope, rate, copy, P, WIDE, SLOPES, COPIES, TOTAL, DECAY, DECAYS: tl.constexpr, ALIKE: tl.constexpr,
    COPIED: tl.constexpr, COPY_ALIKE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """theta[j] -= rate[j] (slope[j] + DECAY theta[j]), and copy[j] = theta[j].

    Rows of weights lie WIDE apart, those of slopes SLOPES and of the copy COPIES; ALIKE says that it is the same.
    """
    at, inside, row = _places(WIDE, TOTAL, BLOCK)
    value = tl.load(theta + at, mask=inside, other=0.0)
    if ALIKE:
        along = tl.load(slope + at, mask=inside, other=0.0)
    else:
        along = tl.load(slope + at + row * (SLOPES - WIDE), mask=inside & (at - row * WIDE < P), other=0.0)
    if DECAYS:
        along += DECAY * value
    value -= tl.load(rate + row, mask=inside, other=0.0) * along
    tl.store(theta + at, value, mask=inside)
    if COPIED:
        if COPY_ALIKE:
            tl.store(copy + at, value.to(copy.dtype.element_ty), mask=inside)
        else:
            there = inside & (at - row * WIDE < P)
            tl.store(copy + at + row * (COPIES - WIDE), value.to(copy.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(theta, out, P, WIDE, COPIES, TOTAL, COPY_ALIKE: tl.constexpr, BLOCK: tl.constexpr):
    """out[j] = theta[j]."""
    at, inside, row = _places(WIDE, TOTAL, BLOCK)
    value = tl.load(theta + at, mask=inside, other=0.0).to(out.dtype.element_ty)
    if COPY_ALIKE:
        tl.store(out + at, value, mask=inside)
    else:
        tl.store(out + at + row * (COPIES - WIDE), value, mask=inside & (at - row * WIDE < P))


def _line(theta: Tensor) -> tuple[tuple[int], int, int, int]:
    """The grid, how many weights a visit has, how far rows lie apart, and the length of the line."""
    visits, length = theta.shape
    total = (visits - 1) * theta.stride(0) + length
    return (triton.cdiv(total, STREAM),), length, theta.stride(0), total


def descend(theta: Tensor, slope: Tensor, rate: Tensor, decay: float, copy: Tensor | None) -> Tensor:
    """A step of SGD in place, with rates [J, 1] or one number; the new weights also go to `copy`."""
    slope = slope if slope.stride(1) == 1 else slope.contiguous()
    rate = rate.expand(len(theta), 1).contiguous()
    grid, length, wide, total = _line(theta)
    there = theta if copy is None else copy
    _descend[grid](
        theta, slope, rate, there, length, wide, slope.stride(0), there.stride(0), total, decay, DECAYS=decay > 0,
        ALIKE=slope.stride(0) == wide, COPIED=copy is not None, COPY_ALIKE=there.stride(0) == wide, BLOCK=STREAM,
    )  # fmt: skip
    return theta


def copy_rows(theta: Tensor, out: Tensor) -> None:
    """Weights [J, P] into the first P columns of `out`, in its type."""
    grid, length, wide, total = _line(theta)
    _copy[grid](theta, out, length, wide, out.stride(0), total, COPY_ALIKE=out.stride(0) == wide, BLOCK=STREAM)
