"""Passes over the parameters of J visits, [J, P]: SGD step, copies and row gather."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...stacked.aligned_rows import BLOCK


@triton.jit  # type: ignore[untyped-decorator]
def _rates_of_rows(rate, first, offset, ROW_STRIDE, TOTAL):
    """The learning rates of a block's elements; a block covers at most two rows."""
    row = first // ROW_STRIDE
    end = (row + 1) * ROW_STRIDE
    this_row, next_row = tl.load(rate + row), tl.load(rate + row + 1, mask=end < TOTAL, other=0.0)
    return tl.where(offset < end, this_row, next_row)


@triton.jit  # type: ignore[untyped-decorator]
def _sgd_step(
    theta,
    grad,
    rate,
    copy,
    ROW_STRIDE,
    TOTAL,
    DECAY,
    DECAYS: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """theta[j] -= rate[j] (grad[j] + DECAY theta[j]), unless rate[j] is 0.

    With COPIES the result also goes to `copy`. Rows of all three have the same stride, a multiple
    of 16, so that the matrices are one line of TOTAL elements, read and written 16 bytes at a
    time.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offset = first + tl.arange(0, BLOCK)
    inside = offset < TOTAL
    value = tl.load(theta + offset, mask=inside, other=0.0)
    step_grad = tl.load(grad + offset, mask=inside, other=0.0)
    if DECAYS:
        step_grad += DECAY * value
    step = _rates_of_rows(rate, first, offset, ROW_STRIDE, TOTAL)
    value = tl.where(step == 0, value, value - step * step_grad)
    tl.store(theta + offset, value, mask=inside)
    if COPIES:
        tl.store(copy + offset, value.to(copy.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, out, P, ROW_STRIDE, TOTAL, BLOCK: tl.constexpr):
    """out[j, :P] = source[j]; rows of `out` are ROW_STRIDE apart, rows of `source` P."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offset = first + tl.arange(0, BLOCK)
    row = first // P
    row = row + (offset >= (row + 1) * P).to(tl.int64)
    value = tl.load(source + offset, mask=offset < TOTAL, other=0.0)
    tl.store(
        out + offset + row * (ROW_STRIDE - P), value.to(out.dtype.element_ty), mask=offset < TOTAL
    )


@triton.jit  # type: ignore[untyped-decorator]
def _copy_line(source, out, TOTAL, BLOCK: tl.constexpr):
    """Copies a line of TOTAL elements, a multiple of 16.

    In a CUDA graph it is faster than the driver's own copy.
    """
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + offset, mask=offset < TOTAL, other=0.0)
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=offset < TOTAL)


@triton.jit  # type: ignore[untyped-decorator]
def _gather_rows(source, index, out, P, ROW_STRIDE, VISITS, BLOCK: tl.constexpr):
    """out[j, :P] = source[index[j]]; rows of `out` have ROW_STRIDE elements, a multiple of 16.

    Programs of the same columns are neighbors: they find in the cache what another visit has read.
    """
    j = tl.program_id(0) % VISITS
    offset = (tl.program_id(0) // VISITS).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + tl.load(index + j) * P + offset, mask=offset < P, other=0.0)
    tl.store(out + j.to(tl.int64) * ROW_STRIDE + offset, value, mask=offset < ROW_STRIDE)


def gather_rows(source: Tensor, index: Tensor, out: Tensor) -> None:
    """Gathers the rows of [K, P] at `index` [J] into the first P columns of `out`, zero-padded."""
    visits, row_stride = out.shape
    grid = (visits * triton.cdiv(row_stride, BLOCK),)
    _gather_rows[grid](source, index, out, source.shape[1], row_stride, visits, BLOCK=BLOCK)


def sgd_step_(theta: Tensor, grad: Tensor, rate: Tensor, decay: float, copy: Tensor | None) -> None:
    """One step of SGD in place with rates [J, 1]; `copy` also receives the new parameters."""
    row_stride = theta.stride(0)
    total = len(theta) * row_stride
    _sgd_step[(triton.cdiv(total, BLOCK),)](
        theta,
        grad,
        rate,
        theta if copy is None else copy,
        row_stride,
        total,
        decay,
        DECAYS=decay > 0,
        COPIES=copy is not None,
        BLOCK=BLOCK,
    )


def copy_rows(theta: Tensor, out: Tensor) -> None:
    """Copies contiguous [J, P] into the first P columns of `out`, in its dtype."""
    _copy[(triton.cdiv(theta.numel(), BLOCK),)](
        theta, out, theta.shape[1], out.stride(0), theta.numel(), BLOCK=BLOCK
    )


def copy_line(theta: Tensor, out: Tensor) -> None:
    """Copies [J, P] and the padding between rows into `out`, which has the same row stride."""
    total = len(theta) * theta.stride(0)
    _copy_line[(triton.cdiv(total, BLOCK),)](theta, out, total, BLOCK=BLOCK)
