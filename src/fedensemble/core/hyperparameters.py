"""Hyperparameters of plug-ins: finite numbers of the declared type."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from ..errors import InputError

_NUMBERS = frozenset({int, float, type(None)})
LARGEST = 3.4028234663852886e38  # of float32; some operations of torch raise for a larger constant


def check_hyperparameters(part: Any) -> None:
    """Raises unless every field declared as a number holds one: not text, not nan and not infinity.

    Called first by a plug-in's `__post_init__`, so that its own comparisons cannot fail on other
    types.
    """
    owner, kind = type(part).__name__, cast(Hashable, type(part))
    for name, choices in _choices(kind):
        if not isinstance(getattr(part, name), type(choices[0])):
            words = ", ".join(map(repr, choices))
            raise InputError(
                f"{owner} needs {name} to be one of {words}; got {getattr(part, name)!r}."
            )
    for name, _ in _fields_of(kind, frozenset({bool})):
        if not isinstance(getattr(part, name), bool):
            raise InputError(
                f"{owner} needs {name} to be True or False; got {getattr(part, name)!r}."
            )
    for name, kinds in _fields_of(kind, _NUMBERS):
        value = getattr(part, name)
        if value is None and type(None) in kinds:
            continue
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InputError(f"{owner} needs a number for {name}; got {value!r}.")
        if float not in kinds and not isinstance(value, Integral):
            raise InputError(f"{owner} needs a whole number for {name}; got {value!r}.")
        if float not in kinds and isinstance(value, Integral) and abs(int(value)) >= 2**63:
            raise InputError(f"{owner} needs {name} within 64 bits; got {value!r}.")
        if float in kinds and not _fits(value):
            raise InputError(f"{owner} needs {name} to be a finite number; got {value!r}.")


def _fits(value: Any) -> bool:
    if isinstance(value, Integral):  # torch takes integers of 64 bits
        return abs(int(value)) < 2**63
    return math.isfinite(float(value))


@cache
def _choices(kind: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Fields of a dataclass that are declared as one of some values, and these values."""
    try:
        hints = get_type_hints(kind)
    except NameError:
        return ()
    found = [(field.name, hints.get(field.name)) for field in fields(kind) if field.init]
    return tuple((name, get_args(hint)) for name, hint in found if get_origin(hint) is Literal)


@cache
def _fields_of(kind: Any, wanted: frozenset[Any]) -> tuple[tuple[str, frozenset[Any]], ...]:
    """Fields of a dataclass that are declared as one of the wanted types or a union of them, and
    their types.
    """
    try:
        hints = get_type_hints(kind)
    except NameError:  # a plug-in's annotation that names a type it imports for type checkers only
        return ()
    found = []
    for field in fields(kind):
        declared = hints.get(field.name)
        several = get_origin(declared) in (Union, UnionType)
        kinds = frozenset(get_args(declared) if several else (declared,))
        if field.init and kinds <= wanted and kinds != {type(None)}:
            found.append((field.name, kinds))
    return tuple(found)
