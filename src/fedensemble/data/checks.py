"""Checks of examples. Each error says which data are meant, what is wrong and in which row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DataError


def check_examples(x: Tensor, y: Tensor, where: str, classes: int | None = None) -> None:
    """Raises unless inputs and targets have equal lengths and valid values.

    Valid values are finite. Labels (integer targets) must be at least 0 and below `classes`.

    Args:
        where: the name of the data in error messages, such as "client 3".
    """
    check_lengths(x, y, where)
    for what, values in (("Inputs", x), ("Targets", y)):
        if len(values) and not values.numel():
            raise DataError(
                f"{what} of {where} have no values: their shape is {tuple(values.shape)}. "
                "Each row needs at least one value."
            )
    for what, values in (("Inputs", x), ("Targets", y)):
        if (row := first_bad_row(values)) is not None:
            raise DataError(
                f"{what} of {where} contain nan or infinity (first in row {row}). "
                "Clean or drop such rows."
            )
    if len(y) and not y.is_floating_point() and int(y.min()) < 0:
        raise DataError(
            f"Labels of {where} must be 0, 1, 2, ...; got {int(y.min())}. Give other labels as "
            "text, and they are numbered: y.astype(str)."
        )
    if len(y) and classes is not None and not y.is_floating_point() and int(y.max()) >= classes:
        raise DataError(
            f"Labels of {where} must be below the number of classes, {classes}; got {int(y.max())}."
        )


def check_test_set(
    x: Tensor | None, y: Tensor | None, train_x: Tensor, classes: int | None
) -> None:
    """Raises if the test set is incomplete or its inputs differ in shape from `train_x`."""
    if (x is None) != (y is None):
        raise DataError("There is only one of x_test and y_test; give both, or neither.")
    if x is not None and y is not None:
        check_examples(x, y, "the test data", classes)
        if x.shape[1:] != train_x.shape[1:]:
            raise DataError(
                f"Test inputs have shape {tuple(x.shape[1:])}, training inputs "
                f"{tuple(train_x.shape[1:])}; they must agree."
            )


def check_server_inputs(x: Tensor, train_x: Tensor) -> None:
    """Raises unless the server's inputs are finite and have the shape of `train_x` per row."""
    if x.dim() == 0 or not len(x) or x.shape[1:] != train_x.shape[1:]:
        raise DataError(
            f"The server's inputs have shape {tuple(x.shape)}, the clients' "
            f"{tuple(train_x.shape)}; give x_server at least one row of the same shape, or None."
        )
    if (row := first_bad_row(x)) is not None:
        raise DataError(
            f"The server's inputs contain nan or infinity (first in row {row}). "
            "Clean or drop such rows."
        )


def check_lengths(x: Tensor, y: Tensor, where: str) -> None:
    """Raises unless inputs and targets have the same number of rows."""
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y):
        raise DataError(
            f"Inputs and targets of {where} must each have one row per example; "
            f"got shapes {tuple(x.shape)} and {tuple(y.shape)}."
        )


def first_bad_row(values: Tensor) -> int | None:
    """Returns the first row that contains nan or infinity, or None."""
    if not values.is_floating_point() or not values.numel():
        return None
    # nan and infinity both show up in the minimum or the maximum. This common path allocates no
    # boolean mask of the size of the data.
    if bool(torch.isfinite(torch.stack(torch.aminmax(values))).all()):
        return None
    return int(torch.nonzero(~torch.isfinite(values).reshape(len(values), -1).all(1))[0])


def first_unrepresentable(values: Tensor, dtype: torch.dtype) -> tuple[int, ...] | None:
    """Returns the index of the first finite value that overflows in `dtype`, or None.

    >>> first_unrepresentable(torch.tensor([[1.0, 1e300]], dtype=torch.float64), torch.float32)
    (0, 1)
    """
    limit = torch.finfo(dtype).max
    if (
        not values.is_floating_point()
        or not values.numel()
        or torch.finfo(values.dtype).max <= limit
    ):
        return None
    # As in `first_bad_row`, the minimum and the maximum decide the common case without a mask.
    if float(torch.stack(torch.aminmax(values)).abs().max()) <= limit:
        return None
    indices = torch.nonzero(values.isfinite() & (values.abs() > limit))
    return tuple(indices[0].tolist()) if len(indices) else None


def check_range(values: Tensor | None, what: str, dtype: torch.dtype) -> None:
    """Raises if a conversion to `dtype` would turn a finite value into infinity."""
    if values is None or (index := first_unrepresentable(values, dtype)) is None:
        return
    row, *rest = index
    column = f", column {rest[0] if len(rest) == 1 else tuple(rest)}" if rest else ""
    name = str(dtype).removeprefix("torch.")
    raise DataError(
        f"{what} hold {float(values[index]):.6g} (first in row {row}{column}), which {name} cannot "
        "hold. Scale the data, drop such rows, or use float64."
    )


def describe_example(values: Tensor) -> str:
    """Returns the shape of one example and its dtype for messages, such as "(28, 28) uint8"."""
    return f"{tuple(values.shape[1:])} {str(values.dtype).removeprefix('torch.')}"


def note_channels_last(x: Tensor) -> str | None:
    """Returns a note if images have their channels last, [n, height, width, channels], or None.

    Lists of PIL images and most image libraries give this layout; torch's layers do not take it.
    """
    shape = tuple(x.shape[1:])
    if x.dim() != 4 or shape[2] not in (1, 3, 4) or min(shape[:2]) <= 4:
        return None
    return (
        f"Images of shape {shape} look like height x width x channels, and torch's "
        "convolutions take channels first: give x.transpose(0, 3, 1, 2) (torch: "
        "x.permute(0, 3, 1, 2)), unless your model expects channels last."
    )
