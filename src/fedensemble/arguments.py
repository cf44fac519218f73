"""Checks of the options of datasets, partitions and engines.

Each error names the owner and the option, the value that was passed, and what is allowed.
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
    """Raises unless `function` accepts all `options`, and no required one is missing.

    Args:
        owner: what to call `function` in messages, such as "partition 'iid'".
        given: names of the parameters that the caller passes itself and that are not options.

    >>> def split(source, alpha=1.0): ...
    >>> options = {"alfa": 2}
    >>> check_names("partition 'split'", split, options, ["source"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedensemble.errors.InputError: unknown option of partition 'split' 'alfa': did you mean ...
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in given
    }
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for name in options:
        if name not in known and not accepts_any:
            raise InputError(
                unknown(f"option of {owner}", name, known)
                if known
                else f"{owner} takes no options; got '{name}'."
            )
    missing = [
        name
        for name, parameter in known.items()
        if parameter.default is parameter.empty and name not in options
    ]
    if missing:
        raise InputError(f"{owner} needs the option '{missing[0]}'. Set it.")


def require_integer(owner: str, name: str, value: Any, minimum: int = 0) -> int:
    """`value` as an int; raises unless it is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise InputError(
            f"{owner} needs {name} to be an integer >= {minimum}; got {name}={value!r}."
        )
    return int(value)


def require_bool(owner: str, name: str, value: Any) -> bool:
    """`value`; raises unless it is a bool."""
    if not isinstance(value, bool):
        raise InputError(f"{owner} needs {name} to be true or false; got {name}={value!r}.")
    return value


def require_positive(owner: str, name: str, value: Any) -> float:
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


def require_nonnegative(owner: str, name: str, value: Any) -> float:
    """`value` as a float; raises unless it is finite and at least 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not math.isfinite(value)
        or value < 0
    ):
        raise InputError(f"{owner} needs {name} to be a finite number >= 0; got {name}={value!r}.")
    return float(value)


def require_fraction(owner: str, name: str, value: Any) -> float:
    """`value` as a float; raises unless it is at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise InputError(
            f"{owner} needs {name} to be at least 0 and below 1; got {name}={value!r}."
        )
    return float(value)


def require_one_of(owner: str, name: str, value: Any, allowed: Collection[str]) -> str:
    """`value`; raises unless it is one of `allowed`."""
    if value not in allowed:
        raise InputError(
            f"{owner} needs {name} to be one of {', '.join(allowed)}; got {name}={value!r}."
        )
    return str(value)


def need_memory(owner: str, size: int, given: str) -> None:
    """Raises if something needs more memory than is free; call it before allocating.

    Args:
        size: bytes that will be needed.
        given: the options that determine the size, for the message: "n=1000 and features=20".
    """
    if size > (free := free_memory()):
        raise InputError(
            f"{owner} needs about {size / 1e9:.3g} GB of memory with {given}, and "
            f"{free / 1e9:.3g} GB are free. Lower them."
        )
