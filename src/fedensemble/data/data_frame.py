"""Tables of inputs with named columns, such as those of pandas, which is never imported here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DataError, first_line


def is_frame(x: Any) -> bool:
    """Returns whether an object is a table with named columns (pandas, polars)."""
    return (
        not isinstance(x, (np.ndarray, Tensor))
        and hasattr(x, "columns")
        and hasattr(x, "to_numpy")
        and hasattr(x, "__getitem__")
    )


def column_names(frame: Any) -> tuple[str, ...]:
    """Returns the names of the columns as text."""
    return tuple(str(column) for column in frame.columns)


def from_frame(x: Any, feature_names: Sequence[str] | None, where: str) -> Any:
    """Returns the values of a table, [n, columns]; anything but a table is returned as it is.

    Bool columns, as pandas.get_dummies makes, become 0 and 1.

    Args:
        feature_names: that the columns must have, in this order; None accepts any.
        where: the name of the data in error messages, such as "client 3".

    Raises:
        DataError: a column is missing, unknown, elsewhere, or does not hold numbers.
    """
    if not is_frame(x):
        return x
    names = column_names(x)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"Two columns of {where} are called {twice!r}; rename one of them.")
    if feature_names is not None:
        check_columns(names, feature_names, where)
    if not names:
        raise DataError(f"There are no columns in {where}.")
    arrays = [
        _column(x[column], name, where) for column, name in zip(x.columns, names, strict=True)
    ]
    return np.stack(arrays, axis=1)  # NumPy finds the type that holds all columns


def check_columns(names: Sequence[str], expected: Sequence[str], where: str) -> None:
    """Raises unless the columns are the expected ones in the expected order.

    Columns in another order are rejected, as scikit-learn does, and not sorted here: a table whose
    columns moved often has other columns than its reader believes.
    """
    if tuple(names) == tuple(expected):
        return
    missing = [name for name in expected if name not in set(names)]
    extra = [name for name in names if name not in set(expected)]
    if missing or extra:
        problems = [
            f"{what} {_list_names(found)}"
            for what, found in (("lack", missing), ("also have", extra))
            if found
        ]
        raise DataError(
            f"The columns of {where} are not those of the training data: they "
            f"{' and '.join(problems)}. Give the {len(expected)} columns of feature_names."
        )
    place = next(index for index, name in enumerate(names) if name != expected[index])
    raise DataError(
        f"Columns of {where} are in another order than in the training data: column {place} is "
        f"{names[place]!r} where {expected[place]!r} is expected. Reorder them: "
        "x[list(feature_names)], with feature_names of the FederatedData or the Ensemble."
    )


def _column(column: Any, name: str, where: str) -> NDArray[Any]:
    """Returns the numbers of a column, [n]."""
    values = np.asarray(column)
    if values.dtype.kind == "b":
        return values.astype(np.float32)
    if values.dtype.kind in "iuf" and values.ndim == 1:
        return values
    # A column of numbers with missing values may come as objects, where None and nan become nan.
    flat = values.ravel().tolist()
    if values.dtype.kind == "O" and not any(isinstance(value, (str, bytes)) for value in flat):
        try:
            return np.array(
                [np.nan if type(v).__name__ == "NAType" else v for v in flat], dtype=np.float64
            )
        except (TypeError, ValueError) as error:
            raise DataError(
                f"Column {name!r} of {where} does not hold numbers: {first_line(error)}. "
                "Convert it, or leave it out."
            ) from None
    kind = "text" if values.dtype.kind in "OUS" else str(values.dtype)
    raise DataError(
        f"Column {name!r} of {where} holds {kind}, and inputs are numbers. Encode it, as by "
        "pandas.get_dummies, or leave it out."
    )


def _list_names(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    shown = ", ".join(repr(name) for name in listed[:most])
    return f"{shown} and {len(listed) - most} more" if len(listed) > most else shown
