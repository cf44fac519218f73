"""Converts arrays, lists and tensors from users to tensors of the dtypes used in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError


def as_tensor(values: Any) -> Tensor:
    """Returns a tensor of a dtype for training.

    float32, float64 and uint8 (images) stay. Other floats become float32, other integers int64.

    Raises:
        DataError: the values are not numbers in dense arrays of one shape.
    """
    reject_masked(values)
    try:
        tensor = (
            values.detach()
            if isinstance(values, Tensor)
            else torch.as_tensor(to_shareable(_as_numbers(np.asarray(values))))
        )
    except DataError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(values, (list, tuple)) and hasattr(values[0], "getbands"):  # of PIL
            raise DataError(
                "The images have different sizes or modes. Give all of them one size and mode: "
                "image.convert('RGB').resize((64, 64))."
            ) from None
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
        # torch's conversion to int64 would silently turn these values into negative ones. Seen as
        # int64, such values are negative, which is how the condition above finds them.
        raise DataError(
            "Data of type uint64 contain values of 2**63 or more, which int64 cannot hold. "
            "Scale them down."
        )
    return tensor if tensor.dtype == torch.uint8 else tensor.long()


def as_inputs(values: Any) -> Tensor:
    """Returns a tensor of inputs: uint8 stays uint8 for images, and becomes int64 for tokens.

    Arrays with three or more dimensions are images.
    """
    x = as_tensor(values)
    return x.long() if x.dtype == torch.uint8 and x.dim() < 3 else x


def as_targets(values: Any) -> Tensor:
    """Returns a tensor of targets: floating-point values, or labels as int64."""
    y = as_tensor(values)
    return y if y.is_floating_point() else y.long()


def _as_numbers(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns an array whose type is not "object"; raises for text."""
    if values.dtype.kind == "O":
        unpacked = np.array(values.tolist())  # an object array of numbers becomes one of numbers
        values = unpacked if unpacked.shape == values.shape else values
    if values.dtype.kind in "US":
        raise DataError(
            "Data must be numbers in arrays of one shape; got text "
            f"({str(values.ravel()[:1].tolist())[1:41]} ...). Encode inputs that are text as "
            "numbers."
        )
    return values


def to_shareable(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the array, or a copy if torch cannot share its memory.

    torch cannot share arrays that are read-only, have negative strides or another byte order.
    """
    values = values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))
    return (
        values if values.flags.writeable and min(values.strides, default=0) >= 0 else values.copy()
    )


def reject_masked(values: Any) -> None:
    """Raises for NumPy masked arrays with masked entries."""
    # `np.asarray` ignores the mask, so the model would be trained on the masked values.
    parts = values if isinstance(values, (list, tuple)) else (values,)
    if any(isinstance(part, np.ma.MaskedArray) and np.ma.is_masked(part) for part in parts):
        raise DataError(
            "Data are a NumPy masked array with masked entries, and the masked values would be "
            "trained on. Fill them, x.filled(0), or drop their rows, np.ma.compress_rows(x)."
        )
