"""Base class and registry of trackers, which log the metrics of a run to other programs.

The config key `track` selects them. They log the records of metrics.jsonl round by round; a resumed
run logs no round twice.
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
    """Logs the metrics of one run.

    Args:
        folder: of the run.
        settings: the config of the run, as plain values.
        records: of earlier rounds, if the run is resumed.
    """

    package: ClassVar[str]  # Python package that it needs
    trace: ClassVar[str]  # file or folder that it leaves in the run's folder

    @abstractmethod
    def __init__(
        self, folder: Path, settings: Mapping[str, Any], records: Sequence[Record]
    ) -> None: ...

    @abstractmethod
    def record(self, record: Record) -> None:
        """Logs the record of a round."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Flushes and closes the log.

        Args:
            finished: False if the run was stopped before its last round.
        """


trackers: Registry[type[Tracker]] = Registry("tracker")


@contextmanager
def tracking(
    names: Sequence[str], folder: Path, settings: Mapping[str, Any], records: Sequence[Record]
) -> Iterator[list[Tracker]]:
    """Context with the trackers of these names; on exit they are closed."""
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
    """Logs a finished run to those trackers that have not logged it yet."""
    missing = [name for name in names if not (folder / trackers[name].trace).exists()]
    with tracking(missing, folder, settings, records):
        pass


def check_installed(names: Sequence[str]) -> None:
    """Raises if a tracker's package is missing."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # must be set before the import
    for name in names:
        package = trackers[name].package
        try:
            import_module(package)
        except ImportError:
            raise InputError(
                f'track = ["{name}"] needs the package {package}, which is not installed: '
                f'pip install "fedensemble[{name}]", or remove it from track.'
            ) from None


def scalars(record: Record) -> dict[str, float]:
    """Returns the scalar metrics of a round's record, by names as TensorBoard groups them.

    >>> scalars({"round": 1, "loss": 0.5, "test": {"nll": 0.9}, "modes": {"nll": [0.8, 0.7]}})
    {'train/loss': 0.5, 'test/nll': 0.9, 'modes/nll/0': 0.8, 'modes/nll/1': 0.7}
    """
    metrics: dict[str, float] = {}
    for key, value in record.items():
        if key == "modes":
            metrics |= {
                f"modes/{name}/{mode}": metric
                for name, per_mode in value.items()
                for mode, metric in enumerate(per_mode)
            }
        elif isinstance(value, Mapping):
            metrics |= {f"{key}/{name}": metric for name, metric in value.items()}
        elif key not in ("round", "age") and isinstance(value, (int, float)):
            metrics[f"train/{key}"] = value
    return metrics


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings as one table with dotted keys.

    >>> flatten({"seed": 0, "ensemble": {"modes": 5}})
    {'seed': 0, 'ensemble.modes': 5}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
