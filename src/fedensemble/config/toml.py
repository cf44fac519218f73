"""Reads TOML files with `extends`, and lays `--set a.b=v` over them."""

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
from .plugins import as_table, without_leftovers

Values = dict[str, Any]


def read_toml(path: Path, _above: tuple[Path, ...] = ()) -> Values:
    """The values of a file, on top of those of the file it `extends` (relative to itself)."""
    path = _resolved(path)
    if path in _above:
        raise InputError(f"{path} extends itself: {' -> '.join(p.name for p in (*_above, path))}.")
    if len(_above) >= LONGEST_CHAIN:
        raise InputError(
            f"{_above[0]} extends a file that extends a file, {LONGEST_CHAIN} times and more. Merge some."
        )
    text = read_text(path, extended=bool(_above))
    try:
        values = parse_toml(text, str(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {_words(error, text)}.") from None
    below = values.pop("extends", None)
    if below is None:
        return values
    if not isinstance(below, str):
        raise InputError(f"{path}: extends must be the path of a TOML file; got {below!r}.")
    return merge(read_toml(path.parent / below, (*_above, path)), values)


def _resolved(path: Path) -> Path:
    """The absolute path; one that no file can have stays as it is, and reading it says why.

    So does a pipe, as in `fedensemble run <(make-config)`: its link in /dev/fd leads to no path.
    """
    try:
        return path if path.is_fifo() else path.resolve()
    except (ValueError, OSError, RuntimeError):  # a NUL, a name that is too long, a loop of links
        return path


def _words(error: tomllib.TOMLDecodeError, text: str) -> str:
    """The parser's words; where a key is there twice, which one."""
    found = re.match(
        r"Cannot (?:overwrite a value|declare .* twice) \(at (?:line (\d+)|end)", str(error)
    )
    if found is None:
        return str(error)
    lines = text.splitlines()
    # a value may have several lines; the last one is told
    for number in range(int(found[1] or len(lines)), 0, -1):
        key = re.match(
            r"\s*(?:\[+\s*(?P<table>[\w.\"'-]+)\s*\]|(?P<key>[\w.\"'-]+)\s*=)", lines[number - 1]
        )
        if key is not None:
            return f"line {number} gives '{key['table'] or key['key']}' for the second time"
    return str(error)


def default_file(name: str) -> Path:
    """A config that comes with the package."""
    return Path(str(files("fedensemble") / "defaults" / name))


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> Values:
    """`over` laid on `under`, table by table; options of a name that `over` replaces go with it.

    >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    >>> merge({"algorithm": {"name": "fedprox", "mu": 1.0, "lr": 0.3}}, {"algorithm": {"name": "fedavg"}})
    {'algorithm': {'name': 'fedavg', 'lr': 0.3}}
    """
    return lay(without_leftovers(under, over), over)


def lay(under: Mapping[str, Any], over: Mapping[str, Any]) -> Values:
    """`over` laid on `under` as if both were written in one place: nothing goes but what is given
    anew.
    """
    merged = dict(under)
    for key, value in over.items():
        kept, new = as_table(key, merged.get(key)), as_table(key, value)
        both = isinstance(new, Mapping) and isinstance(kept, Mapping)
        merged[key] = lay(kept, new) if both else value
    return merged


def parse_setting(text: str) -> Values:
    """The values of one `a.b=v`; v is TOML, and what is not is taken as a word.

    >>> parse_setting("ensemble.modes=3"), parse_setting("data.source=mnist")
    ({'ensemble': {'modes': 3}}, {'data': {'source': 'mnist'}})
    """
    key, found, value = text.partition("=")
    names = key.strip().split(".")
    if not found or not all(names):
        raise InputError(f"--set takes KEY=VALUE, such as ensemble.modes=3; got '{shorten(text)}'.")
    try:
        read = parse_toml(f"value = {value.strip()}", f"--set {shorten(text)}")
        # a newline in it may begin another key
        parsed = read["value"] if len(read) == 1 else value.strip()
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
    """`values` with all `a.b=v` laid over them."""
    changes: Values = {}
    given: dict[str, str] = {}
    for text in settings:
        key = text.partition("=")[0].strip()
        if key in given:
            raise InputError(
                f"{key} is given twice: '{shorten(given[key])}' and '{shorten(text)}'. Give it once."
            )
        given[key] = text
        changes = lay(changes, parse_setting(text))
    return merge(values, changes)
