"""Type and range checks of the hyperparameters of plug-ins."""

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
# The largest float32. Some torch operations raise for a larger constant.
LARGEST = 3.4028234663852886e38


def check_hyperparameters(part: Any) -> None:
    """Raises unless every field of a plug-in has its declared type, and numbers are finite.

    A plug-in's `__post_init__` calls this first, so that its own comparisons cannot fail on values
    of other types.
    """
    owner, cls = type(part).__name__, cast(Hashable, type(part))
    for name, choices in _literal_fields(cls):
        if not isinstance(getattr(part, name), type(choices[0])):
            allowed = ", ".join(map(repr, choices))
            raise InputError(
                f"{owner} needs {name} to be one of {allowed}; got {getattr(part, name)!r}."
            )
    for name, _ in _fields_of_types(cls, frozenset({bool})):
        if not isinstance(getattr(part, name), bool):
            raise InputError(
                f"{owner} needs {name} to be True or False; got {getattr(part, name)!r}."
            )
    for name, types in _fields_of_types(cls, _NUMBERS):
        value = getattr(part, name)
        if value is None and type(None) in types:
            continue
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InputError(f"{owner} needs a number for {name}; got {value!r}.")
        if float not in types and not isinstance(value, Integral):
            raise InputError(f"{owner} needs an integer for {name}; got {value!r}.")
        if float not in types and isinstance(value, Integral) and abs(int(value)) >= 2**63:
            raise InputError(f"{owner} needs {name} within 64 bits; got {value!r}.")
        if float in types and not _is_finite(value):
            raise InputError(f"{owner} needs {name} to be a finite number; got {value!r}.")


def _is_finite(value: Any) -> bool:
    """Whether torch can represent a number: a 64-bit integer or a finite float."""
    if isinstance(value, Integral):
        return abs(int(value)) < 2**63
    return math.isfinite(float(value))


@cache
def _literal_fields(cls: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Names and allowed values of the fields of a dataclass that are declared as `Literal`."""
    hints = _type_hints(cls)
    declared = [(field.name, hints.get(field.name)) for field in fields(cls) if field.init]
    return tuple((name, get_args(hint)) for name, hint in declared if get_origin(hint) is Literal)


@cache
def _fields_of_types(cls: Any, wanted: frozenset[Any]) -> tuple[tuple[str, frozenset[Any]], ...]:
    """Names and types of the fields declared as one of the wanted types, or a union of them."""
    hints = _type_hints(cls)
    if not hints:
        return ()
    selected = []
    for field in fields(cls):
        declared = hints.get(field.name)
        is_union = get_origin(declared) in (Union, UnionType)
        types = frozenset(get_args(declared) if is_union else (declared,))
        if field.init and types <= wanted and types != {type(None)}:
            selected.append((field.name, types))
    return tuple(selected)


def _type_hints(cls: Any) -> dict[str, Any]:
    """The resolved annotations of a class; empty if they cannot be resolved.

    A plug-in's annotations may name a type that it imports for type checkers only.
    """
    try:
        return get_type_hints(cls)
    except NameError:
        return {}
