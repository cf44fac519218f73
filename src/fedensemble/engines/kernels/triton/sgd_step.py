"""Passes over all weights of J visits, [J, P], as Triton kernels: a step of SGD, copies, and rows
by mode.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...stacked.aligned_rows import BLOCK


@triton.jit  # type: ignore[untyped-decorator]
def _rates(rate, first, at, WIDE, TOTAL):
    """The rates of a block's rows, of which there are at most two."""
    row = first // WIDE
    end = (row + 1) * WIDE
    here, after = tl.load(rate + row), tl.load(rate + row + 1, mask=end < TOTAL, other=0.0)
    return tl.where(at < end, here, after)


@triton.jit  # type: ignore[untyped-decorator]
def _descend(
    theta,
    slope,
    rate,
    copy,
    WIDE,
    TOTAL,
    DECAY,
    DECAYS: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """theta[j] -= rate[j] (slope[j] + DECAY theta[j]) unless rate[j] is 0; COPIES, copy[j] =
    theta[j].

    Rows of all three are WIDE long, a multiple of 16, and gone through as one line of TOTAL
    numbers, so that Triton reads and writes 16 bytes at a time.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < TOTAL
    value = tl.load(theta + at, mask=inside, other=0.0)
    along = tl.load(slope + at, mask=inside, other=0.0)
    if DECAYS:
        along += DECAY * value
    step = _rates(rate, first, at, WIDE, TOTAL)
    value = tl.where(step == 0, value, value - step * along)
    tl.store(theta + at, value, mask=inside)
    if COPIES:
        tl.store(copy + at, value.to(copy.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, out, P, WIDE, TOTAL, BLOCK: tl.constexpr):
    """out[j, :P] = source[j]; rows of `out` lie WIDE apart, those of `source` P, whatever that
    is.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    row = first // P
    row = row + (at >= (row + 1) * P).to(tl.int64)
    value = tl.load(source + at, mask=at < TOTAL, other=0.0)
    tl.store(out + at + row * (WIDE - P), value.to(out.dtype.element_ty), mask=at < TOTAL)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_line(source, out, TOTAL, BLOCK: tl.constexpr):
    """Out = source, lines of TOTAL numbers, a multiple of 16; within a graph faster than the
    driver's own copy.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < TOTAL, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < TOTAL)


@triton.jit  # type: ignore[untyped-decorator]
def _chosen(source, index, out, P, WIDE, VISITS, BLOCK: tl.constexpr):
    """out[j, :P] = source[index[j]]; rows of `out` are WIDE long, a multiple of 16.

    Programs of the same columns are neighbours: they find in the cache what another visit has read.
    """
    j = tl.program_id(0) % VISITS
    at = (tl.program_id(0) // VISITS).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + tl.load(index + j) * P + at, mask=at < P, other=0.0)
    tl.store(out + j.to(tl.int64) * WIDE + at, value, mask=at < WIDE)


def chosen(source: Tensor, index: Tensor, out: Tensor) -> None:
    """The rows of [K, P] at `index` [J] into the first P columns of `out`; the others become 0."""
    visits, wide = out.shape
    grid = (visits * triton.cdiv(wide, BLOCK),)
    _chosen[grid](source, index, out, source.shape[1], wide, visits, BLOCK=BLOCK)


def descend(theta: Tensor, slope: Tensor, rate: Tensor, decay: float, copy: Tensor | None) -> None:
    """A step of SGD in place, with rates [J, 1]; the new weights also go to `copy`. Rows are alike,
    see `_descend`.
    """
    wide = theta.stride(0)
    total = len(theta) * wide
    _descend[(triton.cdiv(total, BLOCK),)](
        theta,
        slope,
        rate,
        theta if copy is None else copy,
        wide,
        total,
        decay,
        DECAYS=decay > 0,
        COPIES=copy is not None,
        BLOCK=BLOCK,
    )


def copy_rows(theta: Tensor, out: Tensor) -> None:
    """Weights [J, P], one after another in memory, into the first P columns of `out`, in its
    type.
    """
    _copy[(triton.cdiv(theta.numel(), BLOCK),)](
        theta, out, theta.shape[1], out.stride(0), theta.numel(), BLOCK=BLOCK
    )


def copy_line(theta: Tensor, out: Tensor) -> None:
    """Weights [J, P] in line into `out`, whose rows are as far apart, in its type, with what lies
    between rows.
    """
    total = len(theta) * theta.stride(0)
    _copy_line[(triton.cdiv(total, BLOCK),)](theta, out, total, BLOCK=BLOCK)
