"""Other programs that follow a run, where a config asks for them.

What they are told is what metrics.jsonl holds, round by round, so a run that is resumed tells
nothing twice.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from ..errors import InputError
from ..registry import Registry

Record = Mapping[str, Any]


class Tracker(ABC):
    """Follows one run.

    Args:
        folder: the run's.
        settings: the run's config, as plain values.
        records: what was recorded of the rounds before, when a run is resumed.
    """

    package: ClassVar[str]  # to install
    trace: ClassVar[str]  # in the run's folder once it has followed the run

    @abstractmethod
    def __init__(
        self, folder: Path, settings: Mapping[str, Any], records: Sequence[Record]
    ) -> None: ...

    @abstractmethod
    def record(self, record: Record) -> None:
        """Takes note of a round."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Writes what is left; `finished` tells a run that is done from one that was stopped."""


trackers: Registry[type[Tracker]] = Registry("tracker")


@contextmanager
def tracking(
    names: Sequence[str], folder: Path, settings: Mapping[str, Any], records: Sequence[Record]
) -> Iterator[list[Tracker]]:
    """The trackers of these names, opened; they are told whether the run came to its end."""
    check_installed(names)
    opened: list[Tracker] = []
    finished = False
    try:
        for name in names:
            opened.append(trackers[name](folder, settings, records))
        yield opened
        finished = True
    finally:
        for tracker in opened:
            tracker.close(finished)


def catch_up(
    names: Sequence[str], folder: Path, settings: Mapping[str, Any], records: Sequence[Record]
) -> None:
    """Tells a finished run to the trackers that have not followed it."""
    missing = [name for name in names if not (folder / trackers[name].trace).exists()]
    with tracking(missing, folder, settings, records):
        pass


def check_installed(names: Sequence[str]) -> None:
    """Raises if a tracker's package is missing."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # mlflow reads it when it is imported
    for name in names:
        package = trackers[name].package
        try:
            import_module(package)
        except ImportError:
            raise InputError(
                f'track = ["{name}"] needs the package {package}, which is not installed: '
                f'pip install "fedensemble[{name}]", or leave it out of track.'
            ) from None


def scalars(record: Record) -> dict[str, float]:
    """A round's record as flat names and numbers.

    >>> scalars({"round": 1, "loss": 0.5, "test": {"accuracy": 0.9}, "modes": {"accuracy": [0.8, 0.7]}})
    {'train/loss': 0.5, 'test/accuracy': 0.9, 'modes/accuracy/0': 0.8, 'modes/accuracy/1': 0.7}
    """
    found: dict[str, float] = {}
    for key, value in record.items():
        if key == "modes":
            found |= {
                f"modes/{name}/{mode}": v
                for name, each in value.items()
                for mode, v in enumerate(each)
            }
        elif isinstance(value, Mapping):
            found |= {f"{key}/{name}": inner for name, inner in value.items()}
        elif key not in ("round", "age") and isinstance(value, (int, float)):
            found[f"train/{key}"] = value
    return found


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys.

    >>> flat({"seed": 0, "ensemble": {"modes": 5}})
    {'seed': 0, 'ensemble.modes': 5}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= (
            flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return found
