"""Text that users chose, such as names, labels and paths, as it is shown: nothing in it can steer a
terminal.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .errors import InputError

LONGEST = 200  # characters of a text that somebody else chose, such as a client's error message


def printable(text: str, lines: bool = False) -> str:
    r"""The text with characters that would not be shown as they are, or steer a terminal, written
    as escapes.

    Args:
        lines: leave newlines and tabs, for texts of several lines of our own.

    >>> print(printable("a\x1b[31m\nb"))
    a\x1b[31m\nb
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        c if c in kept or c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def shorten(text: str, longest: int = LONGEST) -> str:
    r"""The text as `printable` shows it, cut to `longest` characters.

    A newline in a client's error message could forge a line of the log, an escape sequence could
    rewrite the operator's terminal, and megabytes of text would fill the disk. The text is cut
    before it is escaped, so that the work is bounded, too.

    >>> shorten("ok" + chr(10) + chr(27) + "[2J")
    'ok\\n\\x1b[2J'
    >>> shorten("abcdefgh", 6)
    'abc...'
    """
    escaped = printable(text[: longest + 1])
    return escaped if len(escaped) <= longest else escaped[: longest - 3] + "..."


def as_path(given: Any, what: str = "folder") -> Path:
    """A path that a user gave; raises unless a file can have it."""
    try:
        path = Path(given)
        os.fsencode(path)
    except (TypeError, ValueError):
        raise InputError(
            f"{what} must be a path, as text or a pathlib.Path; got {given!r}."
        ) from None
    if "\0" in str(path):
        raise InputError(f"{what} must be a path without NUL characters; got {str(path)!r}.")
    return path
