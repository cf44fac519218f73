"""What there is: plug-ins by name, with a line of explanation, and runs."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from ..core.algorithm import algorithms
from ..core.engine import engines
from ..core.participation import participations
from ..core.schedule import schedules
from ..data import partitions, sources
from ..errors import FedEnsembleError, InputError, unknown
from ..experiment.store import find_runs
from ..models import models
from ..registry import Registry
from .methods import describe_method
from .tables import TextTable, show

_REGISTRIES: dict[str, Registry[Any]] = {
    "algorithms": algorithms, "datasets": sources, "engines": engines, "models": models, "partitions": partitions,
    "participations": participations, "schedules": schedules,
}  # fmt: skip


def listing(what: str, runs: Path) -> list[dict[str, Any]]:
    """Everything of a kind, one record each."""
    if what == "runs":
        return [_run(store) for store in find_runs(runs)]
    if what not in _REGISTRIES:
        raise InputError(unknown("list", what, [*_REGISTRIES, "runs"]))
    registry = _REGISTRIES[what]
    records = []
    for name in registry:
        item = registry[name]
        first = (inspect.getdoc(item) or "").split("\n\n")[0].replace("\n", " ")
        record = {"name": name, "what": first}
        records.append(record | describe_method(item) if what == "algorithms" else record)
    return records


def _run(store: Any) -> dict[str, Any]:
    try:
        values = store.read_config()
        summary = store.summary() if store.done else {}
        rounds = len(store.metrics())
    except FedEnsembleError as error:  # one damaged run must not hide the others
        return {"path": str(store.path), "state": "damaged", "result": str(error)}
    tested = summary.get("test", {})
    metric = next((m for m in ("accuracy", "mse") if m in tested), None)
    return {
        "path": str(store.path),
        "algorithm": values["algorithm"]["name"],
        "modes": values["ensemble"]["modes"],
        "schedule": values["ensemble"]["schedule"],
        "seed": values["seed"],
        "rounds": f"{rounds}/{values['rounds']}",
        "state": "done" if store.done else "unfinished",
        "result": f"{metric} {show(metric, tested[metric])}" if metric else "",
    }


def listing_table(what: str, records: list[dict[str, Any]]) -> TextTable:
    """The records as a table."""
    header = tuple(dict.fromkeys(key for record in records for key in record))
    rows = tuple(tuple(_text(record.get(key, "")) for key in header) for record in records)
    return TextTable(what, tuple(key.replace("_", " ") for key in header), rows)


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
