"""Reads TOML files with `extends`, and lays `--set a.b=v` over them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import InputError

Values = dict[str, Any]


def read_toml(path: Path, _above: tuple[Path, ...] = ()) -> Values:
    """The values of a file, on top of those of the file it `extends` (relative to itself)."""
    path = path.resolve()
    if path in _above:
        raise InputError(f"{path} extends itself: {' -> '.join(p.name for p in (*_above, path))}.")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file; a config is TOML.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}.") from None
    below = values.pop("extends", None)
    if below is None:
        return values
    if not isinstance(below, str):
        raise InputError(f"{path}: extends must be the path of a TOML file; got {below!r}.")
    return merge(read_toml(path.parent / below, (*_above, path)), values)


def default_file(name: str) -> Path:
    """A config that comes with the package."""
    return Path(str(files("fedensemble") / "defaults" / name))


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> Values:
    """`over` laid on `under`, table by table. A table that names another plug-in replaces the one below it.

    >>> merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    """
    merged = dict(under)
    for key, value in over.items():
        kept = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(kept, Mapping)
        merged[key] = merge(kept, value) if both else value  # type: ignore[arg-type]
    return merged


def parse_setting(text: str) -> Values:
    """The values of one `a.b=v`; v is TOML, and what is not is taken as a word.

    >>> parse_setting("ensemble.modes=3"), parse_setting("data.source=mnist")
    ({'ensemble': {'modes': 3}}, {'data': {'source': 'mnist'}})
    """
    key, found, value = text.partition("=")
    names = key.strip().split(".")
    if not found or not all(names):
        raise InputError(f"--set takes KEY=VALUE, such as ensemble.modes=3; got '{text}'.")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for name in reversed(names):
        parsed = {name: parsed}
    return parsed  # type: ignore[no-any-return]


def with_settings(values: Mapping[str, Any], settings: Sequence[str]) -> Values:
    """`values` with every `a.b=v` laid over them."""
    merged = dict(values)
    for text in settings:
        merged = merge(merged, parse_setting(text))
    return merged
