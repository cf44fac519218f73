"""Numbers clients that are given by a name or an id per row, such as `groups` of scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import DataError
from .dataset import Rows


def number_clients(values: Any, rows: int, where: str) -> tuple[Rows, tuple[str, ...]]:
    """Returns the number of the client of each row, [n], and the clients' sorted names.

    Args:
        values: the client of each row: integers, texts, or any values that compare.
        rows: number of rows, n.
        where: the values' name in messages, such as "groups".

    >>> number_clients(["b", "a", "b"], 3, "groups")
    (array([1, 0, 1]), ('a', 'b'))
    >>> number_clients([10.0, 9.0], 2, "groups")[1]  # numbers in the order of numbers
    ('9', '10')
    """
    try:
        ids = np.asarray(values)
    except ValueError:  # a ragged list
        ids = np.asarray(None)
    if ids.ndim == 2 and ids.shape[1] == 1:  # a DataFrame of one column
        ids = ids[:, 0]
    if ids.ndim != 1 or len(ids) != rows:
        raise DataError(
            f"{where} must give the client of each of the {rows} rows; got values of shape "
            f"{ids.shape}."
        )
    listed = ids.tolist()
    row = next((row for row, value in enumerate(listed) if _is_missing(value)), None)
    if row is not None:
        raise DataError(
            f"{where} has no client in row {row}. Drop such rows, or give them a client of "
            "their own."
        )
    if ids.dtype.kind == "O" and len({type(value) for value in listed}) > 1:
        kinds = sorted({type(value).__name__ for value in listed})
        if not all(isinstance(value, (int, float)) for value in listed):
            raise DataError(
                f"{where} mixes {' and '.join(kinds)}. Give all clients as text, or as numbers."
            )
    try:
        names, group = np.unique(ids, return_inverse=True)
    except TypeError:
        raise DataError(
            f"{where} has clients of type {type(listed[0]).__name__}, which cannot be sorted. "
            "Give texts or numbers."
        ) from None
    return group.reshape(-1).astype(np.int64), tuple(_name(name) for name in names.tolist())


def _is_missing(value: Any) -> bool:
    """Whether a value stands for none: None, nan, an empty text or pandas.NA."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, float):
        return math.isnan(value)
    return isinstance(value, (str, bytes)) and not value.strip()


def _name(value: Any) -> str:
    """The name of a client; 3.0, as pandas reads whole numbers in columns with gaps, is '3'."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
