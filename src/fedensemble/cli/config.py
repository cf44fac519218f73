"""Reads the config of a command: a file or the default one, with the overrides of its options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..config.build import resolve_device
from ..config.schema import Config, resolve
from ..config.toml import default_file, read_toml, with_settings
from ..errors import InputError


def load_config(
    file: Path | None, settings: Sequence[str] | None, device: str | None = None
) -> Config:
    """Returns the config with "auto" replaced by the device of this machine."""
    return resolve_device(read_config(file, settings, device))


def read_config(
    file: Path | None, settings: Sequence[str] | None, device: str | None = None
) -> Config:
    """Returns the config as written, independent of the machine: device "auto" stays "auto"."""
    if file is not None and file.is_dir():
        file = run_config_file(file)
    values = read_toml(file or default_file("digits.toml"))
    overrides = "".join(f" --set {text}" for text in settings or ())
    origin = f"{file or 'the default config'}{' with' if overrides else ''}{overrides}"
    return resolve(with_settings(values, all_settings(settings, device)), origin)


def run_config_file(folder: Path) -> Path:
    """Returns the config in the folder of a run; raises if the folder is none."""
    file = folder / "config.toml"
    if not file.exists():
        raise InputError(
            f"{folder} is a folder, but no run: it has no config.toml. Give a file, or the folder "
            "of a run; 'fedensemble ls runs' shows all runs."
        )
    return file


def all_settings(settings: Sequence[str] | None, device: str | None) -> list[str]:
    """Returns the overrides "key=value" of --set and --device."""
    return [*(settings or []), *([f"engine.device={device}"] if device else [])]
