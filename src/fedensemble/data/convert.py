"""What users give, arrays, lists or tensors, as tensors of the types that are trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError


def as_tensor(values: Any) -> Tensor:
    """A tensor of numbers: floats as float32, labels as int64, bytes (images) as they are."""
    _refuse_masked(values)
    try:
        tensor = (
            values.detach()
            if isinstance(values, Tensor)
            else torch.as_tensor(sharable(np.asarray(values)))
        )
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(
            f"Data must be numbers in arrays of one shape; got {type(values).__name__}: {error}"
        ) from None
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise DataError(
            f"Data must be dense tensors with values; got a tensor of layout {tensor.layout}."
        )
    if tensor.is_floating_point():
        return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise DataError(
            f"Data of type {tensor.dtype} cannot be trained on; convert it to numbers first."
        )
    if tensor.dtype == torch.uint64 and tensor.numel() and int(tensor.view(torch.int64).min()) < 0:
        # torch's conversion to int64 would turn them into negative numbers without a word.
        raise DataError(
            "Data of type uint64 hold numbers of 2**63 or more, which int64 cannot hold. Scale them down."
        )
    return tensor if tensor.dtype == torch.uint8 else tensor.long()


def as_inputs(values: Any) -> Tensor:
    """A tensor of inputs: bytes stay bytes if they are images (three axes or more), and become
    tokens if not.
    """
    x = as_tensor(values)
    return x.long() if x.dtype == torch.uint8 and x.dim() < 3 else x


def as_targets(values: Any) -> Tensor:
    """A tensor of targets: floating-point numbers, or labels as int64."""
    y = as_tensor(values)
    return y if y.is_floating_point() else y.long()


def sharable(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array, or a copy of one that torch cannot share memory with: read-only, reversed or of
    another byte order.
    """
    values = values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))
    return (
        values if values.flags.writeable and min(values.strides, default=0) >= 0 else values.copy()
    )


def _refuse_masked(values: Any) -> None:
    """Raises for NumPy masked arrays with masked entries: `np.asarray` would bring back what the
    mask hides.
    """
    parts = values if isinstance(values, (list, tuple)) else (values,)
    if any(np.ma.is_masked(part) for part in parts):
        raise DataError(
            "Data are a NumPy masked array with masked entries, and what they hide would be trained on. Fill them, "
            "x.filled(0), or drop their rows, np.ma.compress_rows(x)."
        )
