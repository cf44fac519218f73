"""Checks of examples: an error says whose they are, what is wrong with them and where."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DataError


def check_examples(x: Tensor, y: Tensor, where: str, classes: int | None = None) -> None:
    """Raises unless inputs and targets are of one length and finite, and labels from 0 to `classes`
    - 1.
    """
    check_lengths(x, y, where)
    for what, values in (("Inputs", x), ("Targets", y)):
        if len(values) and not values.numel():
            raise DataError(
                f"{what} of {where} have no values: their shape is {tuple(values.shape)}. Each row needs a value."
            )
    for what, values in (("Inputs", x), ("Targets", y)):
        if (row := first_bad_row(values)) is not None:
            raise DataError(
                f"{what} of {where} contain nan or infinity (first in row {row}). Clean or drop such rows."
            )
    if len(y) and not y.is_floating_point() and int(y.min()) < 0:
        raise DataError(f"Labels of {where} must be 0, 1, 2, ...; got {int(y.min())}.")
    if len(y) and classes is not None and not y.is_floating_point() and int(y.max()) >= classes:
        raise DataError(
            f"Labels of {where} must be below the number of classes, {classes}; got {int(y.max())}."
        )


def check_test(x: Tensor | None, y: Tensor | None, like: Tensor, classes: int | None) -> None:
    """Raises unless there is no test set, or a whole one with inputs `like` the clients'."""
    if (x is None) != (y is None):
        raise DataError("There is only one of x_test and y_test; give both, or neither.")
    if x is not None and y is not None:
        check_examples(x, y, "the test data", classes)
        if x.shape[1:] != like.shape[1:]:
            raise DataError(
                f"Test inputs have shape {tuple(x.shape[1:])}, training inputs {tuple(like.shape[1:])}; "
                "they must agree."
            )


def check_server(x: Tensor, like: Tensor) -> None:
    """Raises unless the server's inputs are finite, and `like` the clients'."""
    if x.dim() == 0 or not len(x) or x.shape[1:] != like.shape[1:]:
        raise DataError(
            f"The server's inputs have shape {tuple(x.shape)}, the clients' {tuple(like.shape)}; "
            "give x_server one row or more of the same kind, or None."
        )
    if (row := first_bad_row(x)) is not None:
        raise DataError(
            f"The server's inputs contain nan or infinity (first in row {row}). Clean or drop such rows."
        )


def check_lengths(x: Tensor, y: Tensor, where: str) -> None:
    """Raises unless inputs and targets are of one length."""
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y):
        got = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise DataError(
            f"Inputs and targets of {where} must have one row an example each; got shapes {got}."
        )


def first_bad_row(values: Tensor) -> int | None:
    """The first row with nan or infinity, or None; found without a copy: both show in the smallest
    or the largest.
    """
    if not values.is_floating_point() or not values.numel():
        return None
    if bool(torch.isfinite(torch.stack(torch.aminmax(values))).all()):
        return None
    return int(torch.nonzero(~torch.isfinite(values).reshape(len(values), -1).all(1))[0])


def first_too_large(values: Tensor, dtype: torch.dtype) -> tuple[int, ...] | None:
    """The place of the first finite number that `dtype` cannot hold, or None; found without a copy
    if there is none.

    >>> first_too_large(torch.tensor([[1.0, 1e300]], dtype=torch.float64), torch.float32)
    (0, 1)
    """
    if (
        not values.is_floating_point()
        or not values.numel()
        or torch.finfo(values.dtype).max <= torch.finfo(dtype).max
    ):
        return None
    most = torch.finfo(dtype).max
    if float(torch.stack(torch.aminmax(values)).abs().max()) <= most:
        return None
    found = torch.nonzero(values.isfinite() & (values.abs() > most))
    return tuple(found[0].tolist()) if len(found) else None


def check_range(values: Tensor | None, what: str, dtype: torch.dtype) -> None:
    """Raises if `dtype` would make infinities of finite numbers: where, which one, and what to
    do.
    """
    if values is None or (place := first_too_large(values, dtype)) is None:
        return
    row, *rest = place
    column = f", column {rest[0] if len(rest) == 1 else tuple(rest)}" if rest else ""
    name = str(dtype).removeprefix("torch.")
    raise DataError(
        f"{what} hold {float(values[place]):.6g} (first in row {row}{column}), which {name} cannot hold. Scale the "
        "data, drop such rows, or use float64."
    )


def describe(values: Tensor) -> str:
    """Shape of one example and its type, for messages."""
    return f"{tuple(values.shape[1:])} {str(values.dtype).removeprefix('torch.')}"
