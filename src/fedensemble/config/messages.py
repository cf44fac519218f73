"""Error messages for the validation errors of pydantic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

from ..errors import unknown
from .plugin_tables import Table, table_class

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # of runs and comparisons, which are names of folders
LONGEST_NAME = 100  # characters; file systems allow 255 bytes
_NOT_A_LIST = ("is_instance_of", "sequence_str", "list_type", "tuple_type")
_A_TABLE = "must be a table of settings"
_MESSAGES = {
    "dict_type": _A_TABLE,
    "model_type": _A_TABLE,
    "model_attributes_type": _A_TABLE,
    "string_type": "must be text",
    "too_short": "must have something in it",
}


# Returns hints for an unknown key, given its path and the known keys of its table.
Suggest = Callable[[Sequence[str], Sequence[str]], list[str]]


def sentence(
    error: Any, table: type[Table], prefix: str = "", suggest: Suggest | None = None
) -> str:
    """Returns the message for one error of pydantic.

    Args:
        error: an item of `ValidationError.errors()`.
        table: the class of the table that was validated.
        prefix: path of that table in the config.
        suggest: for unknown keys; by default, the closest key of the same table is the hint.
    """
    path = error["loc"]
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        # An unknown key in an item of a list is reported at the item: "row 2: unknown key ...".
        shown_path = path[:-1] if len(path) > 1 and isinstance(path[-2], int) else path
        known = list(_find_table(table, path[:-1]).model_fields)
        full_path = [*prefix.split("."), *map(str, path)] if prefix else [*map(str, path)]
        hints = suggest(full_path, known) if suggest else ()
        return f"{_format_key(shown_path, prefix)}: {unknown('key', str(path[-1]), known, hints)}"
    key = _format_key(path, prefix)
    if kind == "missing":
        return f"{key}: is missing, and has no default."
    if kind in _NOT_A_LIST and error.get("ctx", {}).get("class", "Sequence") == "Sequence":
        # A string such as "[8" is a list with a syntax error, so it is no element of the example.
        example = [32] if isinstance(value, str) and value.startswith("[") else [value]
        return f"{key}: must be a list, such as {example}; got {value!r}."
    if kind == "string_pattern_mismatch" and error["ctx"]["pattern"] == NAME:
        return (
            f"{key}: must be letters, digits, '-', '_' and '.', the first a letter or a digit; "
            f"got {value!r}."
        )
    message = _MESSAGES.get(kind) or error["msg"][0].lower() + error["msg"][1:]
    return f"{key}: {message}; got {_truncated_repr(value)}."


def _truncated_repr(value: Any) -> str:
    """Returns the first 200 characters of the repr of a value."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _format_key(path: Sequence[str | int], prefix: str) -> str:
    """Returns a path as text, such as "row 2: set.a"; items of lists count from 1."""
    key, separator = prefix, "." if prefix else ""
    for part in path:
        key += f" {part + 1}" if isinstance(part, int) else f"{separator}{part}"
        separator = ": " if isinstance(part, int) else "."
    return key


def _find_table(table: Any, path: Sequence[str | int]) -> type[Table]:
    """Returns the class of the table at a path, also inside lists and dicts of tables."""
    for part in path:
        table = table_class(table) or table
        type_arguments = get_args(table)
        if type_arguments:
            table = type_arguments[-1]
        else:
            field = getattr(table, "model_fields", {}).get(part)
            table = Table if field is None else field.annotation
    return table_class(table) or Table
