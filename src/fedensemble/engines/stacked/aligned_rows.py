"""All weights of J visits, [J, P], in rows that can be read as one line; passes over them: SGD's
step, and copies.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
STREAM = 2048  # weights that one program of a pass takes
LINE = 16  # rows of a multiple of so many numbers can be read as one line, 16 bytes at a time


def descend(
    theta: Tensor, slope: Tensor, rate: Tensor, decay: float, copy: Tensor | None = None
) -> Tensor:
    """Weights [J, P] after a step of SGD, written over them in one pass. Rates are [J, 1] or one
    number.

    Where the rate is 0 they stand still, whatever the slope: visits that are done may bring one
    that is no number.

    Args:
        copy: where the new weights go, too, in another type; see `copy_rows`.
    """
    alike = copy is None or copy.stride(0) == theta.stride(0)
    if HAS_TRITON and _single(theta) and is_aligned(theta) and alike:
        from ..kernels.triton.sgd_step import descend as quickly

        if slope.shape != theta.shape or slope.stride() != theta.stride() or not is_aligned(slope):
            slope = to_aligned(slope.expand_as(theta))
        quickly(theta, slope, rate.expand(len(theta), 1).contiguous(), decay, copy)
        return theta
    slope = slope + decay * theta if decay > 0 else slope
    theta.addcmul_(torch.where(rate != 0, slope, 0), rate, value=-1)
    if copy is not None:
        copy_rows(theta, copy)
    return theta


def chosen(source: Tensor, index: Tensor) -> Tensor:
    """The rows of [K, P] at `index` [J], as weights [J, P]."""
    if not (HAS_TRITON and _plain(source)):
        return source.index_select(0, index)  # on a GPU half the time of source[index]
    from ..kernels.triton.sgd_step import chosen as quickly

    out = source.new_empty(len(index), _wide(source.shape[1]))
    quickly(source, index, out)
    return out[:, : source.shape[1]]


def copy_rows(theta: Tensor, out: Tensor) -> Tensor:
    """Weights [J, P] copied to the first P columns of `out`, in its type; those columns."""
    columns = out[:, : theta.shape[1]]
    if not (HAS_TRITON and _single(theta)):
        return columns.copy_(theta)
    from ..kernels.triton import sgd_step

    if is_aligned(theta) and theta.stride() == out.stride():
        sgd_step.copy_line(theta, out)
    elif _plain(theta):
        sgd_step.copy_rows(theta, out)
    else:
        columns.copy_(theta)
    return columns


def empty_aligned(theta: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for weights [J, P] in rows whose length is a multiple of 16."""
    return theta.new_empty(len(theta), _wide(theta.shape[1]), dtype=dtype)


def to_aligned(theta: Tensor) -> Tensor:
    """A copy of weights [J, P] in such rows."""
    return copy_rows(theta, empty_aligned(theta))


def is_aligned(theta: Tensor) -> bool:
    """Whether weights [J, P] lie in such rows, each at least as long as a block of the kernel's."""
    wide = theta.stride(0)
    held = theta.untyped_storage().nbytes() // theta.element_size() - theta.storage_offset()
    return (
        theta.stride(1) == 1 and wide % LINE == 0 and wide >= STREAM and held >= len(theta) * wide
    )


def _wide(length: int) -> int:
    return -(-length // LINE) * LINE


def _plain(theta: Tensor) -> bool:
    """Whether a kernel that goes through rows as they come can take them."""
    return _single(theta) and theta.is_contiguous() and theta.shape[1] >= STREAM


def _single(theta: Tensor) -> bool:
    return theta.is_cuda and theta.dtype == torch.float32
