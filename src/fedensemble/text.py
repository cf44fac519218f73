"""Text that users chose, such as names, labels and paths, as it is shown: nothing in it can steer a terminal."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from typing import Any

from .errors import InputError

# Control characters, formats (such as the one that reverses the direction of text), surrogates, line separators.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str, lines: bool = False) -> str:
    r"""The text with characters that would not be shown as they are, or steer a terminal, written as escapes.

    Args:
        lines: leave newlines and tabs, for texts of several lines of our own.

    >>> print(printable("a\x1b[31m\nb"))
    a\x1b[31m\nb
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        c.encode("unicode_escape").decode("ascii") if c not in kept and unicodedata.category(c) in _HIDDEN else c
        for c in text
    )


def as_path(given: Any, what: str = "folder") -> Path:
    """A path that a user gave; raises unless a file can have it."""
    try:
        path = Path(given)
        os.fsencode(path)
    except (TypeError, ValueError):
        raise InputError(f"{what} must be a path, as text or a pathlib.Path; got {given!r}.") from None
    if "\0" in str(path):
        raise InputError(f"{what} must be a path without NUL characters; got {str(path)!r}.")
    return path
