"""Checks of the options of aggregators and attacks."""

from __future__ import annotations

import math

from ..errors import InputError


def check_share(owner: object, name: str) -> None:
    """Raises unless an attribute is a share of clients below one half."""
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 0.5:
        raise InputError(f"{type(owner).__name__} needs 0 <= {name} < 0.5; got {name}={value!r}.")


def check_positive(owner: object, name: str) -> None:
    """Raises unless an attribute is a finite number above 0."""
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InputError(f"{type(owner).__name__} needs a finite {name} > 0; got {name}={value!r}.")


def check_count(owner: object, name: str) -> None:
    """Raises unless an attribute is an integer of at least 1."""
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            f"{type(owner).__name__} needs an integer {name} >= 1; got {name}={value!r}."
        )


def tolerated(share: float, clients: int) -> int:
    """Number of a mode's clients that may be malicious: the share, rounded up, but a minority.

    >>> [tolerated(0.2, n) for n in (1, 2, 3, 5, 6, 10)]
    [0, 0, 1, 1, 2, 2]
    """
    count = math.ceil(share * clients - 1e-9)  # 0.2 * 15 is 3.0000000000000004
    return min(count, (clients - 1) // 2)
