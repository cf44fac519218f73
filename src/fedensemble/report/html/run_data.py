"""Reads what a report shows from a run's folder, without its data set or its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import FedEnsembleError, InputError, StoreError, first_line
from ...experiment.prediction_summary import MAX_CLIENTS
from ...experiment.storage.read_json import read_bytes, read_table
from ...experiment.storage.run_folder import RunFolder
from ..run_report import read_records, unfinished


@dataclass(frozen=True)
class RunData:
    """The contents of a run's folder; parts that an older or unfinished run lacks are empty."""

    path: Path
    settings: Mapping[str, Any]
    config: str
    records: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    done: bool
    clients: Mapping[str, Any]
    predictions: Mapping[str, Any]
    environment: Mapping[str, Any]
    changes: str = ""  # a sentence on files changed since the run was finished
    diverged: str = ""  # why the run has diverged
    distillation: Mapping[str, Any] = field(default_factory=dict)  # of a distilled model

    @property
    def tested(self) -> list[Mapping[str, Any]]:
        """The records of the rounds with a test."""
        return [record for record in self.records if "test" in record]

    @property
    def average(self) -> str:
        """The name of the average over rounds that predicts; empty if the current modes do."""
        name = str((self.settings.get("average") or {}).get("name", ""))
        return "" if name == "none" else name

    @property
    def metric(self) -> str:
        """The main metric: accuracy or MSE."""
        # A loss of one's own, of a federation saved from Python, does not tell the task.
        regression = self.summary.get("task") == "regression"
        return "mse" if regression or self.settings["training"]["loss"] == "mse" else "accuracy"


def read_run(folder: Path) -> RunData:
    """The contents of a run's folder; raises if there is no round yet."""
    store = RunFolder(folder)
    settings, records = store.read_config(), read_records(store)
    return RunData(
        path=folder,
        settings=settings,
        config=read_bytes(store.config_file).decode("utf-8"),
        records=records,
        summary=store.summary() if store.done else unfinished(settings, records),
        done=store.done,
        clients=optional(store.clients_file) or read_roster(folder, settings),
        predictions=optional(store.predictions_file) if store.done else {},
        environment=optional(folder / "env.json"),
        changes=store.changes(),
        diverged=store.divergence(),
        distillation=optional(store.distillation_file),
    )


@contextmanager
def raise_on_damaged_files(folder: Path) -> Iterator[None]:
    """Raises StoreError for errors that come from files with missing or wrong contents."""
    try:
        yield
    except FedEnsembleError:
        raise
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        reason = (
            f"lacks {error}"
            if isinstance(error, KeyError)
            else f"{type(error).__name__}: {first_line(error)}"
        )
        raise StoreError(
            f"The files in {folder} cannot be shown: one of them is damaged, incomplete or of "
            f"another version ({reason})."
        ) from error


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run rather than a comparison; raises if it holds neither."""
    if (folder / "config.toml").exists():
        return True
    if any((folder / name).exists() for name in ("runs.json", "table.csv", "table.md")):
        return False
    if not folder.is_dir():
        raise InputError(
            f"There is no folder {folder}; give the folder of a run or of a comparison."
        )
    raise InputError(
        f"{folder} is neither a run (it has no config.toml) nor a comparison (no table.csv)."
    )


def optional(file: Path) -> dict[str, Any]:
    """The contents of a JSON file; empty if there is no such file."""
    if not file.exists():
        return {}
    return read_table(file)


def read_roster(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What clients.json would say, from roster.json, for fleets of versions without clients.json.

    Empty if the run has no roster.
    """
    if not (folder / "roster.json").exists():
        return {}
    members = read_table(folder / "roster.json")["members"]
    sizes = [int(member[1]) for member in members]
    summary = {"clients": len(sizes), "examples": sum(sizes), "source": "fleet"}
    if not settings.get("report", {}).get("publish_clients", True):
        return {**summary, "published": False}
    names = [str(member[0]) for member in members]
    return {**summary, "size": sizes[:MAX_CLIENTS], "names": names[:MAX_CLIENTS]}
