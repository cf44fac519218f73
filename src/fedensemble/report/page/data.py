"""Reads what a report shows from a run's folder; nothing else is needed, no data set and no model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError, StoreError
from ...experiment.store import RunFolder, read_json
from ..run import unfinished


@dataclass(frozen=True)
class RunData:
    """A run as its folder has it; what an older or unfinished run lacks is empty."""

    path: Path
    settings: Mapping[str, Any]
    config: str
    records: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    done: bool
    clients: Mapping[str, Any]
    predictions: Mapping[str, Any]
    environment: Mapping[str, Any]

    @property
    def tested(self) -> list[Mapping[str, Any]]:
        """The rounds with a test."""
        return [record for record in self.records if "test" in record]

    @property
    def metric(self) -> str:
        """What counts: accuracy or MSE."""
        return "mse" if self.settings["training"]["loss"] == "mse" else "accuracy"


def read_run(folder: Path) -> RunData:
    """What a run's folder says; raises if there is no round yet."""
    store = RunFolder(folder)
    settings, records = store.read_config(), store.metrics()
    if not records:
        raise InputError(f"The run in {folder} has no finished round yet.")
    return RunData(
        path=folder, settings=settings, config=store.config_file.read_text(encoding="utf-8"), records=records,
        summary=store.summary() if store.done else unfinished(settings, records), done=store.done,
        clients=optional(store.clients_file), predictions=optional(store.predictions_file) if store.done else {},
        environment=optional(folder / "env.json"),
    )  # fmt: skip


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's, not a comparison's; raises if it is neither."""
    if (folder / "config.toml").exists():
        return True
    if any((folder / name).exists() for name in ("runs.json", "table.csv", "table.md")):
        return False
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}; give that of a run or of a comparison.")
    raise InputError(f"{folder} is neither a run (it has no config.toml) nor a comparison (no table.csv).")


def optional(file: Path) -> dict[str, Any]:
    """What a JSON file holds; empty if there is none."""
    if not file.exists():
        return {}
    held = read_json(file)
    if not isinstance(held, dict):
        raise StoreError(f"{file} is damaged: it should hold a table, and holds {json.dumps(held)[:40]}.")
    return held
