"""Hyperparameters of plug-ins: finite numbers of the declared type."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..errors import InputError

LARGEST = 3.4028234663852886e38  # of float32; some operations of torch raise for a larger constant


def check_hyperparameters(part: Any) -> None:
    """Raises unless every field declared as a number holds one: not text, not nan and not infinity.

    Called first by a plug-in's `__post_init__`, so that its own comparisons cannot fail on other types.
    """
    owner = type(part).__name__
    for name, kinds in _numeric_fields(type(part)):
        value = getattr(part, name)
        if value is None and type(None) in kinds:
            continue
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InputError(f"{owner} needs a number for {name}; got {value!r}.")
        if float not in kinds and not isinstance(value, Integral):
            raise InputError(f"{owner} needs a whole number for {name}; got {value!r}.")
        if float not in kinds and abs(int(value)) >= 2**63:
            raise InputError(f"{owner} needs {name} within 64 bits; got {value!r}.")
        if float in kinds and not _fits(value):
            raise InputError(f"{owner} needs {name} to be a finite number; got {value!r}.")


def _fits(value: Real) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an integer that no float holds
        return False


@cache
def _numeric_fields(kind: type) -> tuple[tuple[str, frozenset[Any]], ...]:
    """Fields of a dataclass that are declared as int, float, or one of them or None."""
    try:
        hints = get_type_hints(kind)
    except NameError:  # a plug-in's annotation that names a type it imports for type checkers only
        return ()
    found = []
    for field in fields(kind):
        declared = hints.get(field.name)
        several = get_origin(declared) in (Union, UnionType)
        kinds = frozenset(get_args(declared) if several else (declared,))
        if field.init and kinds <= {int, float, type(None)} and kinds != {type(None)}:
            found.append((field.name, kinds))
    return tuple(found)
