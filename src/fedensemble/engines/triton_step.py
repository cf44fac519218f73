"""Passes over all weights of J visits, [J, P], as Triton kernels: a step of SGD, and the copy that products read."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .kernels import STREAM


@triton.jit  # type: ignore[untyped-decorator]
def _places(P, TOTAL, BLOCK: tl.constexpr):
    """Places in the flat matrix, whether they are inside, and their rows; a block has parts of at most two."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    row = first // P
    return at, at < TOTAL, row + (at >= (row + 1) * P).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _descend(
    theta, slope, rate, copy, P, WIDE, TOTAL, DECAY, DECAYS: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """theta[j] -= rate[j] (slope[j] + DECAY theta[j]); COPIES, copy[j, :P] = theta[j], whose rows lie WIDE apart."""
    at, inside, row = _places(P, TOTAL, BLOCK)
    value = tl.load(theta + at, mask=inside, other=0.0)
    along = tl.load(slope + at, mask=inside, other=0.0)
    if DECAYS:
        along += DECAY * value
    value -= tl.load(rate + row, mask=inside, other=0.0) * along
    tl.store(theta + at, value, mask=inside)
    if COPIES:
        tl.store(copy + at + row * (WIDE - P), value.to(copy.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, out, P, WIDE, TOTAL, BLOCK: tl.constexpr):
    """out[j, :P] = source[j]; rows of `out` lie WIDE apart."""
    at, inside, row = _places(P, TOTAL, BLOCK)
    value = tl.load(source + at, mask=inside, other=0.0)
    tl.store(out + at + row * (WIDE - P), value.to(out.dtype.element_ty), mask=inside)


def descend(theta: Tensor, slope: Tensor, rate: Tensor, decay: float, copy: Tensor | None) -> Tensor:
    """A step of SGD in place, with rates [J, 1] or one number; the new weights also go to `copy`."""
    rate = rate.expand(len(theta), 1).contiguous()
    _descend[(triton.cdiv(theta.numel(), STREAM),)](
        theta, slope.contiguous(), rate, theta if copy is None else copy, theta.shape[1],
        0 if copy is None else copy.stride(0), theta.numel(), decay, DECAYS=decay > 0, COPIES=copy is not None,
        BLOCK=STREAM,
    )  # fmt: skip
    return theta


def copy_rows(theta: Tensor, out: Tensor) -> None:
    """Weights [J, P] into the first P columns of `out`, in its type."""
    _copy[(triton.cdiv(theta.numel(), STREAM),)](theta, out, theta.shape[1], out.stride(0), theta.numel(), BLOCK=STREAM)
