"""Reads TOML files with `extends`, and overrides their values by `--set a.b=v`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..text import shorten
from .limits import DEEPEST, LONGEST_CHAIN, check_values, parse_toml, read_text
from .plugins import as_table, drop_stale_options

Values = dict[str, Any]


def read_toml(path: Path, _extended_by: tuple[Path, ...] = ()) -> Values:
    """Returns the values of a file, which override those of the file that it `extends`.

    The path in `extends` is relative to the folder of the file.
    """
    path = _absolute_path(path)
    if path in _extended_by:
        chain = " -> ".join(file.name for file in (*_extended_by, path))
        raise InputError(f"{path} extends itself: {chain}.")
    if len(_extended_by) >= LONGEST_CHAIN:
        raise InputError(
            f"{_extended_by[0]} extends a file that extends a file, {LONGEST_CHAIN} times and "
            "more. Merge some."
        )
    text = read_text(path, extended=bool(_extended_by))
    try:
        values = parse_toml(text, str(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            f"{path} is not valid TOML: {_explain_syntax_error(error, text)}."
        ) from None
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise InputError(f"{path}: extends must be the path of a TOML file; got {base!r}.")
    return merge(read_toml(path.parent / base, (*_extended_by, path)), values)


def _absolute_path(path: Path) -> Path:
    """Returns the absolute path; pipes and invalid paths are returned as they are.

    The link of a pipe in /dev/fd, as in `fedensemble run <(make-config)`, does not resolve to a
    path. For an invalid path, reading the file raises the error with the explanation.
    """
    try:
        return path if path.is_fifo() else path.resolve()
    except (ValueError, OSError, RuntimeError):  # NUL character, too long, loop of links
        return path


def _explain_syntax_error(error: tomllib.TOMLDecodeError, text: str) -> str:
    """Returns the message of the parser; for a duplicate key, a message that names the key."""
    duplicate = re.match(
        r"Cannot (?:overwrite a value|declare .* twice) \(at (?:line (\d+)|end)", str(error)
    )
    if duplicate is None:
        return str(error)
    lines = text.splitlines()
    # The parser reports the last line of a value, which may have several lines. Search backwards
    # for the line with the key.
    for number in range(int(duplicate[1] or len(lines)), 0, -1):
        key = re.match(
            r"\s*(?:\[+\s*(?P<table>[\w.\"'-]+)\s*\]|(?P<key>[\w.\"'-]+)\s*=)", lines[number - 1]
        )
        if key is not None:
            return f"line {number} gives '{key['table'] or key['key']}' for the second time"
    return str(error)


def default_file(name: str) -> Path:
    """Returns the path of a config that comes with the package."""
    return Path(str(files("fedensemble") / "defaults" / name))


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> Values:
    """Returns `under` overridden by `over`, table by table.

    If `over` replaces the name of a plug-in, such as the algorithm, the options in `under` that the
    new plug-in does not accept are dropped.

    >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    >>> under = {"algorithm": {"name": "fedprox", "mu": 1.0, "lr": 0.3}}
    >>> merge(under, {"algorithm": {"name": "fedavg"}})
    {'algorithm': {'name': 'fedavg', 'lr': 0.3}}
    """
    return merge_tables(drop_stale_options(under, over), over)


def merge_tables(
    under: Mapping[str, Any], over: Mapping[str, Any], at: tuple[str, ...] = ()
) -> Values:
    """Returns `under` overridden by `over`, table by table, without dropping any option.

    Args:
        at: the path of both tables in the config.
    """
    merged = dict(under)
    for key, value in over.items():
        path = (*at, key)
        old, new = as_table(path, merged.get(key)), as_table(path, value)
        both_tables = isinstance(new, Mapping) and isinstance(old, Mapping)
        merged[key] = merge_tables(old, new, path) if both_tables else value
    return merged


def parse_setting(text: str) -> Values:
    """Returns the values of one `a.b=v`. v is parsed as TOML; if that fails, it is a string.

    >>> parse_setting("ensemble.modes=3"), parse_setting("data.source=mnist")
    ({'ensemble': {'modes': 3}}, {'data': {'source': 'mnist'}})
    """
    key, equals_sign, value = text.partition("=")
    names = key.strip().split(".")
    if not equals_sign or not all(names):
        raise InputError(f"--set takes KEY=VALUE, such as ensemble.modes=3; got '{shorten(text)}'.")
    try:
        values = parse_toml(f"value = {value.strip()}", f"--set {shorten(text)}")
        # A newline in the text can start another key. Then the text is a string, too.
        parsed = values["value"] if len(values) == 1 else value.strip()
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    check_values([*names, parsed], f"--set {shorten(text)}")
    if len(names) > DEEPEST:
        raise InputError(f"--set {shorten(text)}: a key has at most {DEEPEST} parts.")
    nested: Any = parsed
    for name in reversed(names):
        nested = {name: nested}
    return nested  # type: ignore[no-any-return]


def with_settings(values: Mapping[str, Any], settings: Sequence[str]) -> Values:
    """Returns `values` overridden by all `a.b=v`."""
    check_given_once(settings)
    changes: Values = {}
    for text in settings:
        changes = merge_tables(changes, parse_setting(text))
    return merge(values, changes)


def check_given_once(settings: Sequence[str]) -> None:
    """Raises if two `a.b=v` have the same key."""
    texts: dict[str, str] = {}
    for text in settings:
        key = text.partition("=")[0].strip()
        if key in texts:
            raise InputError(
                f"{key} is given twice: '{shorten(texts[key])}' and '{shorten(text)}'. "
                "Give it once."
            )
        texts[key] = text
