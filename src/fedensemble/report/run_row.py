"""A run in one line: what tells it from others, and its last result."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..data import partitions, sources
from ..errors import FedEnsembleError
from ..experiment.run_folder import RunFolder
from ..models import models
from ..registry import Registry
from .tables import show

SAID = ("source", "clients")  # in words of their own


def run_record(store: RunFolder) -> dict[str, Any]:
    """Where a run is, its data, model, algorithm and rate, and the result of its latest test."""
    try:
        values, records = store.read_config(), store.metrics()
        summary = store.summary() if store.done else {}
        return _record(store, values, records, summary)
    except (FedEnsembleError, LookupError, TypeError, ValueError, AttributeError) as error:
        # One damaged run must not hide the others. What it lacks is known only where it is used.
        said = f"a file lacks {error}" if isinstance(error, KeyError) else str(error)
        return {"path": str(store.path), "state": "damaged", "result": said}


def _record(
    store: RunFolder,
    values: Mapping[str, Any],
    records: list[dict[str, Any]],
    summary: Mapping[str, Any],
) -> dict[str, Any]:
    latest = [record["test"] for record in records if "test" in record][-1:]
    tested = summary.get("test") or (latest[0] if latest else {})
    metric = next((m for m in ("accuracy", "mse") if m in tested), None)
    return {
        "path": str(store.path),
        "data": _data(values["data"]),
        "model": _named(models, values["model"]["name"], values["model"]),
        "algorithm": values["algorithm"]["name"],
        "lr": values["algorithm"].get("lr", ""),
        "modes": values["ensemble"]["modes"],
        "schedule": values["ensemble"]["schedule"],
        "seed": values["seed"],
        "rounds": f"{len(records)}/{values['rounds']}",
        "state": f"{store.state}, changed since" if store.changes() else store.state,
        "result": f"{metric} {show(metric, tested[metric])}" if metric else "",
    }


def _data(values: Mapping[str, Any]) -> str:
    """Where the data are from, how they are divided, and among how many."""
    divided = _named(partitions, values["partition"], values)
    return f"{_named(sources, values['source'], values)}, {divided}, {values.get('clients') or 'natural'} clients"


def _named(registry: Registry[Any], name: str, values: Mapping[str, Any]) -> str:
    """A plug-in's name, with those of its options that are not as it has them by itself."""
    known = inspect.signature(registry[name]).parameters if name in registry else {}
    named = [key for key in known if key in values and key not in SAID]
    given = (f"{key}={values[key]}" for key in named if values[key] != known[key].default)
    return " ".join([name, *given])
