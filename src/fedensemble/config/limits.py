"""Limits of a config: size of a file, depth of nesting, size of integers."""

from __future__ import annotations

import math
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError

LARGEST_FILE = 1_000_000  # bytes of a TOML file
DEEPEST = 20  # levels of nested tables and lists; settings need four
LONGEST_KEY = 200  # characters
LONGEST_CHAIN = 20  # files in a chain of `extends`


def read_text(path: Path, extended: bool) -> str:
    """Returns the text of a config file.

    The file named on the command line may be a pipe, as in `fedensemble run <(make-config)`. A file
    that another file extends must be a regular file: reading a pipe without a writer would wait
    forever, and a device may never end.

    Args:
        extended: whether another file extends this one.
    """
    try:
        with open(path, "rb", opener=_open_without_blocking if extended else None) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode) and (extended or not stat.S_ISFIFO(mode)):
                raise InputError(f"Cannot read {path}: it is not a regular file.")
            content = file.read(LARGEST_FILE + 1)
    except InputError:
        raise
    except ValueError:
        raise InputError(
            f"{str(path)!r} is not a path: it contains a character that no path can contain."
        ) from None
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from None
    if len(content) > LARGEST_FILE:
        raise InputError(
            f"{path} has more than {LARGEST_FILE:,} bytes; a config is a short TOML file."
        )
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file; a config is TOML.") from None


def _open_without_blocking(path: str, flags: int) -> int:
    """Opens a file; unlike `open`, it does not wait for a writer if the file is a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Returns the values of a TOML text.

    Args:
        where: the name of the text in error messages.

    Raises:
        tomllib.TOMLDecodeError: the text is not TOML.
        InputError: a value is beyond the limits.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise InputError(f"{where}: tables or lists nest more than {DEEPEST} deep.") from None
    except ValueError as error:  # an integer of thousands of digits, a date that does not exist
        raise InputError(
            f"{where} holds a value that cannot be read: {str(error).partition(';')[0]}."
        ) from None
    check_values(values, where)
    return values


def check_values(values: Any, where: str) -> None:
    """Raises if values nest too deeply, or contain keys, numbers or texts that are not allowed."""
    pending: list[tuple[Any, int]] = [(values, 0)]
    while pending:  # a loop, because recursion would fail for deep nesting before the check does
        value, depth = pending.pop()
        if depth > DEEPEST:
            raise InputError(f"{where}: tables or lists nest more than {DEEPEST} deep.")
        pending += [(inner, depth + 1) for inner in _children(value)]
        if isinstance(value, Mapping) and (
            long_key := next((key for key in value if len(str(key)) > LONGEST_KEY), None)
        ):
            raise InputError(
                f"{where}: a key has at most {LONGEST_KEY} characters; "
                f"got {str(long_key)[:60]!a}..."
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            digits = f"{value}" if abs(value) < 10**30 else "an integer of more than 30 digits"
            raise InputError(f"{where}: integers have at most 64 bits; got {digits}.")
        if isinstance(value, float) and math.isnan(value):
            raise InputError(f"{where}: a setting cannot be nan.")
        if isinstance(value, str) and (
            "\0" in value or any("\ud800" <= c <= "\udfff" for c in value)
        ):
            raise InputError(f"{where}: text must be Unicode without NUL; got {value[:60]!a}.")


def _children(value: Any) -> Iterator[Any]:
    """Yields the keys and values of a table, or the elements of a list."""
    if isinstance(value, Mapping):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
