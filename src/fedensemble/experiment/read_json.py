"""Reads text files of a run; what is missing, unreadable or of another form is a StoreError that
names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..durable import reason
from ..errors import StoreError


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {reason(error)}") from None


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    try:
        return json.loads(read_bytes(path).decode("utf-8"))
    except StoreError:
        raise
    except RecursionError:
        raise StoreError(f"{path} cannot be read: it is nested too deep.") from None
    except ValueError as error:
        raise StoreError(f"{path} cannot be read: {error}.") from None


def read_table(path: Path) -> dict[str, Any]:
    """What a JSON file holds, which must be a table."""
    held = read_json(path)
    if not isinstance(held, dict):
        raise StoreError(
            f"{path} is damaged: it should hold a table, and holds {json.dumps(held)[:40]}."
        )
    return held


def need_keys(path: Path, held: Mapping[str, Any], keys: Sequence[str], what: str = "it") -> None:
    """Raises if a table of a file lacks one of these keys; dotted ones are keys of tables in it."""
    for key in keys:
        inner: Any = held
        for part in key.split("."):
            if not isinstance(inner, Mapping) or part not in inner:
                raise StoreError(f"{path} is damaged: {what} lacks '{key}'.")
            inner = inner[part]


def need_numbers(
    path: Path, held: Mapping[str, Any], keys: Sequence[str], what: str = "it"
) -> None:
    """As `need_keys`, for keys whose values must be numbers."""
    need_keys(path, held, keys, what)
    for key in keys:
        if isinstance(held[key], bool) or not isinstance(held[key], (int, float)):
            raise StoreError(
                f"{path} is damaged: '{key}' of {what} is no number but {json.dumps(held[key])[:40]}."
            )
