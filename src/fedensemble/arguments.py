"""Checks of options of sources, partitions and engines: an error says which one, what was got and
what is allowed.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any

from .errors import InputError, unknown
from .runtime.hardware import free_memory


def check_names(
    owner: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    given: Collection[str] = (),
) -> None:
    """Raises unless `options` are keywords `function` takes, and none it needs is missing.

    Args:
        owner: the words for `function` in a message, such as "partition 'iid'".
        given: names of parameters that are passed in another way, and are no options.

    >>> def split(source, alpha=1.0): ...
    >>> check_names("partition 'split'", split, {"alfa": 2}, given=["source"])
    Traceback (most recent call last):
    fedensemble.errors.InputError: unknown option of partition 'split' 'alfa': did you mean 'alpha'? Known: alpha.
    """
    parameters = {
        name: value
        for name, value in inspect.signature(function).parameters.items()
        if name not in given
    }
    takes_any = any(value.kind is value.VAR_KEYWORD for value in parameters.values())
    known = {
        name: value
        for name, value in parameters.items()
        if value.kind in (value.POSITIONAL_OR_KEYWORD, value.KEYWORD_ONLY)
    }
    for name in options:
        if name not in known and not takes_any:
            raise InputError(
                unknown(f"option of {owner}", name, known)
                if known
                else f"{owner} takes no options; got '{name}'."
            )
    missing = [
        name
        for name, value in known.items()
        if value.default is value.empty and name not in options
    ]
    if missing:
        raise InputError(f"{owner} needs the option '{missing[0]}'. Set it.")


def whole(owner: str, name: str, value: Any, minimum: int = 0) -> int:
    """`value` as an int; raises unless it is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise InputError(
            f"{owner} needs {name} to be a whole number >= {minimum}; got {name}={value!r}."
        )
    return int(value)


def flag(owner: str, name: str, value: Any) -> bool:
    """`value`; raises unless it is true or false."""
    if not isinstance(value, bool):
        raise InputError(f"{owner} needs {name} to be true or false; got {name}={value!r}.")
    return value


def positive(owner: str, name: str, value: Any) -> float:
    """`value` as a float; raises unless it is finite and above 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise InputError(
            f"{owner} needs {name} to be a finite number above 0; got {name}={value!r}."
        )
    return float(value)


def not_negative(owner: str, name: str, value: Any) -> float:
    """`value` as a float; raises unless it is finite and at least 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not math.isfinite(value)
        or value < 0
    ):
        raise InputError(f"{owner} needs {name} to be a finite number >= 0; got {name}={value!r}.")
    return float(value)


def fraction(owner: str, name: str, value: Any) -> float:
    """`value` as a float; raises unless it is at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise InputError(
            f"{owner} needs {name} to be at least 0 and below 1; got {name}={value!r}."
        )
    return float(value)


def one_of(owner: str, name: str, value: Any, allowed: Collection[str]) -> str:
    """`value`; raises unless it is one of `allowed`."""
    if value not in allowed:
        raise InputError(
            f"{owner} needs {name} to be one of {', '.join(allowed)}; got {name}={value!r}."
        )
    return str(value)


def need_memory(owner: str, size: int, given: str) -> None:
    """Raises if making something takes more bytes than there are, before anything is allocated."""
    if size > (free := free_memory()):
        raise InputError(
            f"{owner} needs about {size / 1e9:.3g} GB of memory with {given}, and {free / 1e9:.3g} GB are free. "
            "Lower them."
        )
