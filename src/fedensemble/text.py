"""Untrusted text, such as names, labels and clients' messages, made safe to print and to log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .errors import InputError

LONGEST = 200  # characters to which untrusted text, such as a client's error message, is cut


def printable(text: str, lines: bool = False) -> str:
    r"""The text with unprintable characters, such as a terminal's control sequences, as escapes.

    Args:
        lines: keep newlines and tabs, for text of several lines that this library composed.

    >>> print(printable("a\x1b[31m\nb"))
    a\x1b[31m\nb
    """
    if text.isprintable():
        return text
    allowed = "\n\t" if lines else ""
    return "".join(
        c if c in allowed or c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def shorten(text: str, longest: int = LONGEST) -> str:
    r"""The text as `printable` shows it, cut to `longest` characters.

    A newline in a client's error message could forge a line of the log, an escape sequence could
    rewrite the operator's terminal, and megabytes of text would fill the disk. The text is cut
    before it is escaped, so that the time is bounded as well.

    >>> shorten("ok" + chr(10) + chr(27) + "[2J")
    'ok\\n\\x1b[2J'
    >>> shorten("abcdefgh", 6)
    'abc...'
    """
    escaped = printable(text[: longest + 1])
    return escaped if len(escaped) <= longest else escaped[: longest - 3] + "..."


def as_path(value: Any, what: str = "folder") -> Path:
    """A user's argument as a path; raises unless it is a possible path of a file.

    Args:
        what: the name of the argument, for messages.
    """
    try:
        path = Path(value)
        os.fsencode(path)
    except (TypeError, ValueError):
        raise InputError(
            f"{what} must be a path, as text or a pathlib.Path; got {value!r}."
        ) from None
    if "\0" in str(path):
        raise InputError(f"{what} must be a path without NUL characters; got {str(path)!r}.")
    return path
