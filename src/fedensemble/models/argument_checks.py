"""Checks of options that several models have."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from ..errors import InputError


def check_dropout(model: str, dropout: Any) -> float:
    """The dropout probability as a float; raises InputError unless 0 <= dropout < 1.

    A negative probability would train without dropout, and 1 or more would drop all units.
    """
    if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0 <= float(dropout) < 1:
        raise InputError(
            f"Model '{model}' needs dropout to be at least 0 and below 1; got {dropout!r}."
        )
    return float(dropout)


def check_widths(model: str, name: str, widths: Any) -> Sequence[int]:
    """The widths unchanged; raises InputError unless all of them are integers of at least 1."""
    if isinstance(widths, str) or not isinstance(widths, Sequence):
        raise InputError(
            f"Model '{model}' needs {name} to be a list of integers, such as [64]; got {widths!r}."
        )
    for width in widths:
        if isinstance(width, bool) or not isinstance(width, Integral) or width < 1:
            raise InputError(
                f"Model '{model}' needs integers of at least 1 in {name}; got {width!r}."
            )
    return widths


def check_positive(model: str, **options: Any) -> None:
    """Raises InputError unless every option is a finite number above 0."""
    for name, value in options.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, Real)
            or not 0 < float(value) < math.inf
        ):
            raise InputError(f"Model '{model}' needs {name} > 0; got {value!r}.")
