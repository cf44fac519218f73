"""Reads JSON files of a run; a missing, unreadable or malformed file raises a StoreError."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...durable import describe_os_error
from ...errors import StoreError


def read_bytes(path: Path) -> bytes:
    """Returns the content of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {describe_os_error(error)}") from None


def read_json(path: Path) -> Any:
    """Returns the value in a JSON file."""
    try:
        return json.loads(read_bytes(path).decode("utf-8"))
    except StoreError:
        raise
    except RecursionError:
        raise StoreError(f"{path} cannot be read: it is nested too deep.") from None
    except ValueError as error:
        raise StoreError(f"{path} cannot be read: {error}.") from None


def read_table(path: Path) -> dict[str, Any]:
    """Returns the value in a JSON file, which must be an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise StoreError(
            f"{path} is damaged: expected a JSON object, but got {json.dumps(value)[:40]}."
        )
    return value


def need_keys(path: Path, table: Mapping[str, Any], keys: Sequence[str], what: str = "it") -> None:
    """Raises a StoreError if a table lacks one of the keys.

    Args:
        path: the file of the table, which the error names.
        table: in which the keys are required.
        keys: a dotted key "a.b" is key "b" of the table "a".
        what: the table's name in the error.
    """
    for key in keys:
        inner: Any = table
        for part in key.split("."):
            if not isinstance(inner, Mapping) or part not in inner:
                raise StoreError(f"{path} is damaged: {what} lacks '{key}'.")
            inner = inner[part]


def need_numbers(
    path: Path, table: Mapping[str, Any], keys: Sequence[str], what: str = "it"
) -> None:
    """Like `need_keys`, and also raises if a value is not a number."""
    need_keys(path, table, keys, what)
    for key in keys:
        if isinstance(table[key], bool) or not isinstance(table[key], (int, float)):
            value = json.dumps(table[key])[:40]
            raise StoreError(f"{path} is damaged: '{key}' of {what} is not a number but {value}.")
