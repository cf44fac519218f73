"""What pydantic finds wrong with a table, in our words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from ..errors import unknown
from .plugin_tables import Table

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # of runs and comparisons: they become folders
LONGEST_NAME = 100  # file systems allow 255 bytes
_NO_LIST = ("is_instance_of", "sequence_str", "list_type", "tuple_type")
_A_TABLE = "must be a table of settings"
_WORDS = {
    "dict_type": _A_TABLE,
    "model_type": _A_TABLE,
    "model_attributes_type": _A_TABLE,
    "string_type": "must be text",
    "too_short": "must have something in it",
}


def sentence(error: Any, table: type[Table], prefix: str = "") -> str:
    """One problem found by pydantic; `table` is what was checked."""
    place = error["loc"]
    kind, got = error["type"], error["input"]
    if kind == "extra_forbidden":
        inside = place[:-1] if len(place) > 1 and isinstance(place[-2], int) else place
        return f"{_key(inside, prefix)}: {unknown('key', str(place[-1]), _holder(table, place[:-1]).model_fields)}"
    key = _key(place, prefix)
    if kind == "missing":
        return f"{key}: is missing, and has no default."
    if kind in _NO_LIST and error.get("ctx", {}).get("class", "Sequence") == "Sequence":
        # "[8" was to be a list
        example = [32] if isinstance(got, str) and got.startswith("[") else [got]
        return f"{key}: must be a list, such as {example}; got {got!r}."
    if kind == "string_pattern_mismatch" and error["ctx"]["pattern"] == NAME:
        return f"{key}: must be letters, digits, '-', '_' and '.', the first a letter or a digit; got {got!r}."
    words = _WORDS.get(kind) or error["msg"][0].lower() + error["msg"][1:]
    return f"{key}: {words}; got {_shown(got)}."


def _shown(got: Any) -> str:
    """A value for a message: its beginning, where it is long."""
    text = repr(got)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _key(place: Sequence[str | int], prefix: str) -> str:
    """Where it is: names with dots between them, and after a list's name a number, counted from
    1.
    """
    key, joint = prefix, "." if prefix else ""
    for part in place:
        key += f" {part + 1}" if isinstance(part, int) else f"{joint}{part}"
        joint = ": " if isinstance(part, int) else "."
    return key


def _holder(table: Any, path: Sequence[str | int]) -> type[Table]:
    """The table at a path, within lists and dicts of tables too."""
    for part in path:
        inner = get_args(table)
        if inner:
            table = inner[-1]
        else:
            field = getattr(table, "model_fields", {}).get(part)
            table = Table if field is None else field.annotation
    return table if isinstance(table, type) and issubclass(table, Table) else Table
