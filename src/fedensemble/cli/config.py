"""The config of a command line: a file or the default, and what its options change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..config.build import resolve_device
from ..config.schema import Config, resolve
from ..config.toml import default_file, read_toml, with_settings


def load_config(
    file: Path | None, settings: Sequence[str] | None, device: str | None = None
) -> Config:
    """The config, with its device resolved."""
    return resolve_device(read_config(file, settings, device))


def read_config(
    file: Path | None, settings: Sequence[str] | None, device: str | None = None
) -> Config:
    """The config as it is written, for any machine: "auto" stays."""
    values = read_toml(file or default_file("digits.toml"))
    sets = "".join(f" --set {text}" for text in settings or ())
    where = f"{file or 'the default config'}{' with' if sets else ''}{sets}"
    return resolve(with_settings(values, all_settings(settings, device)), where)


def all_settings(settings: Sequence[str] | None, device: str | None) -> list[str]:
    """What --set and --device change."""
    return [*(settings or []), *([f"engine.device={device}"] if device else [])]
