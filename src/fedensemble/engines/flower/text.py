"""Text that came from somebody else, made safe for a log and short enough for a file."""

from __future__ import annotations

LONGEST = 200  # characters of a reason or a name


def printable(text: str, longest: int = LONGEST) -> str:
    r"""The text with control characters escaped, cut to `longest` characters.

    A newline in a client's error message could forge a line of the log, and an escape sequence could rewrite the
    operator's terminal; megabytes of text would fill the disk. The text is cut before it is escaped, so that the work
    is bounded too.

    >>> printable("ok" + chr(10) + chr(27) + "[2J")
    'ok\\n\\x1b[2J'
    >>> printable("abcdefgh", 6)
    'abc...'
    """
    escaped = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text[: longest + 1]
    )
    return escaped if len(escaped) <= longest else escaped[: longest - 3] + "..."
