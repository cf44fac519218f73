"""[J, P] matrices whose row stride is a multiple of 16 elements, and fused passes over them.

The passes (SGD step, cast copy, row gather) are memory-bound. With aligned rows the whole matrix is
one contiguous line of memory that a Triton kernel reads 16 bytes at a time; with rows of odd length
the compiler falls back to scalar loads, which are several times slower.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
BLOCK = 2048  # elements per program of a pass
ALIGNMENT = 16  # elements


def sgd_step_(
    theta: Tensor, grad: Tensor, rate: Tensor, decay: float, copy: Tensor | None = None
) -> Tensor:
    """Updates parameters [J, P] in place by one step of SGD, in one pass over memory.

    Where the rate is 0 the parameters stay as they are even if the gradient is NaN: visits that
    have finished still compute gradients, of padding, next to those that go on.

    Args:
        rate: learning rates, [J, 1] or one number.
        decay: weight decay.
        copy: also receives the new parameters, in another dtype; see `copy_rows`.
    """
    same_rows = copy is None or copy.stride(0) == theta.stride(0)
    if HAS_TRITON and _is_cuda_float32(theta) and is_aligned(theta) and same_rows:
        from ..kernels.triton.sgd_step import sgd_step_ as triton_sgd_step_

        if grad.shape != theta.shape or grad.stride() != theta.stride() or not is_aligned(grad):
            grad = to_aligned(grad.expand_as(theta))
        triton_sgd_step_(theta, grad, rate.expand(len(theta), 1).contiguous(), decay, copy)
        return theta
    grad = grad + decay * theta if decay > 0 else grad
    theta.addcmul_(torch.where(rate != 0, grad, 0), rate, value=-1)
    if copy is not None:
        copy_rows(theta, copy)
    return theta


def gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """The rows of [K, P] at `index` [J], as [J, P] with aligned rows on a GPU."""
    if not (HAS_TRITON and _is_contiguous_float32(source)):
        return source.index_select(0, index)  # on a GPU half the time of source[index]
    from ..kernels.triton.sgd_step import gather_rows as triton_gather_rows

    out = source.new_empty(len(index), _aligned_length(source.shape[1]))
    triton_gather_rows(source, index, out)
    return out[:, : source.shape[1]]


def copy_rows(theta: Tensor, out: Tensor) -> Tensor:
    """Copies [J, P] to the first P columns of `out`, in its dtype; returns those columns."""
    columns = out[:, : theta.shape[1]]
    if not (HAS_TRITON and _is_cuda_float32(theta)):
        return columns.copy_(theta)
    from ..kernels.triton import sgd_step

    if is_aligned(theta) and theta.stride() == out.stride():
        sgd_step.copy_line(theta, out)
    elif _is_contiguous_float32(theta):
        sgd_step.copy_rows(theta, out)
    else:
        columns.copy_(theta)
    return columns


def empty_aligned(theta: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty matrix for [J, P] with aligned rows: [J, P rounded up to a multiple of 16]."""
    return theta.new_empty(len(theta), _aligned_length(theta.shape[1]), dtype=dtype)


def to_aligned(theta: Tensor) -> Tensor:
    """A copy of [J, P] with aligned rows."""
    return copy_rows(theta, empty_aligned(theta))


def is_aligned(theta: Tensor) -> bool:
    """True if [J, P] has aligned rows, each at least as long as a block of the kernels."""
    stride = theta.stride(0)
    storage = theta.untyped_storage().nbytes() // theta.element_size() - theta.storage_offset()
    aligned = theta.stride(1) == 1 and stride % ALIGNMENT == 0 and stride >= BLOCK
    return aligned and storage >= len(theta) * stride


def _aligned_length(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _is_contiguous_float32(theta: Tensor) -> bool:
    """True if a kernel that goes through unaligned rows can take the matrix."""
    return _is_cuda_float32(theta) and theta.is_contiguous() and theta.shape[1] >= BLOCK


def _is_cuda_float32(theta: Tensor) -> bool:
    return theta.is_cuda and theta.dtype == torch.float32
