"""A run on one line: the settings that distinguish it from others, and its last result."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ...data import datasets, partitions
from ...errors import FedEnsembleError
from ...experiment.storage.run_folder import RunFolder
from ...models import models
from ...registry import Registry
from .result_table import show

SHOWN_SEPARATELY = ("source", "clients")  # options that `_data` shows itself


def run_record(store: RunFolder) -> dict[str, Any]:
    """Folder, data, model, algorithm and rate of a run, and the result of its latest test."""
    try:
        values, records = store.read_config(), store.metrics()
        summary = store.summary() if store.done else {}
        return _record(store, values, records, summary)
    except (FedEnsembleError, LookupError, TypeError, ValueError, AttributeError) as error:
        # A listing shows many runs, and one damaged run must not hide the others. Missing values
        # show up only where they are used, hence the many exceptions caught here.
        reason = f"a file lacks {error}" if isinstance(error, KeyError) else str(error)
        return {"path": str(store.path), "state": "damaged", "result": reason}


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
        "model": _with_options(models, values["model"]["name"], values["model"]),
        "algorithm": values["algorithm"]["name"],
        "lr": values["algorithm"].get("lr", ""),
        "modes": 1 if store.is_distilled else values["ensemble"]["modes"],
        "schedule": values["ensemble"]["schedule"],
        "seed": values["seed"],
        "rounds": "distilled" if store.is_distilled else f"{len(records)}/{values['rounds']}",
        "state": f"{store.state}, changed since" if store.changes() else store.state,
        "result": f"{metric} {show(metric, tested[metric])}" if metric else "",
    }


def _data(values: Mapping[str, Any]) -> str:
    """The source of the data, the partition and the number of clients, as one phrase."""
    if values["source"] == "schema":
        return "fleet" + (f", {values['clients']} clients" if values.get("clients") else "")
    if values["source"] not in datasets:  # of a federation saved from Python
        return f"{values['source']}, {values.get('clients')} clients"
    source = _with_options(datasets, values["source"], values)
    partition = _with_options(partitions, values["partition"], values)
    return f"{source}, {partition}, {values.get('clients') or 'natural'} clients"


def _with_options(registry: Registry[Any], name: str, values: Mapping[str, Any]) -> str:
    """The name of a plug-in with those of its options that differ from their defaults."""
    known = inspect.signature(registry[name]).parameters if name in registry else {}
    present = [key for key in known if key in values and key not in SHOWN_SEPARATELY]
    changed = (f"{key}={values[key]}" for key in present if values[key] != known[key].default)
    return " ".join([name, *changed])
