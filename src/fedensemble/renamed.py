"""Keeps plug-ins working that override a method under its earlier name."""

import warnings
from collections.abc import Mapping


def adopt_earlier_names(cls: type, renamed: Mapping[str, str]) -> None:
    """Binds attributes that a new subclass defines under an earlier name to the current name.

    Base classes of plug-ins call this in `__init_subclass__`. The engines call the current names
    only, so without it an override under the earlier name would silently have no effect.

    Args:
        renamed: maps each earlier name to the current one.
    """
    for old, new in renamed.items():
        if old in vars(cls) and new not in vars(cls):
            setattr(cls, new, vars(cls)[old])
            warnings.warn(
                f"{cls.__name__}.{old} is called {new} now: rename it.",
                DeprecationWarning,
                stacklevel=3,
            )
