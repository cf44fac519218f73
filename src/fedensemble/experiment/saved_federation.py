"""Saves a federation that was trained in Python as the folder of a finished run.

The files are those of `run`, so that the commands of the command line read them. The checkpoint
also has the arguments of the federation, because a config cannot express all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

import tomli_w

from .. import durable
from ..config.schema import Config
from ..durable import json_bytes
from ..errors import StoreError
from ..federation import serialization
from ..federation.federation import Federation
from ..federation.named_models import model_facts
from ..text import as_path
from .evaluation import describe_calibration, write_prediction_summary
from .federation_config import describe_federation
from .prediction_summary import compact_bytes, describe_clients
from .records import engine_facts, environment, summarize
from .setup import fingerprint
from .storage.checksums import FILE as CHECKSUMS
from .storage.ensemble_file import category_facts, write_modes
from .storage.read_json import read_table
from .storage.run_folder import RunFolder

_SAVED_FROM = {"saved_from": "Python"}  # entry of env.json, unless a command made the folder
# Keys that a run of the command line and a federation that continues it may differ in.
_MAY_DIFFER = {"rounds", "evaluation.every"}


def save_federation(federation: Federation, folder: str | Path) -> Path:
    """Writes the run folder of a federation; returns its path. See `Federation.save`."""
    path = as_path(folder)
    tensors = federation.checkpoint_tensors()  # a collective call, on every rank
    if not federation.engine.is_writer:
        return path
    values, config = describe_federation(federation, path.resolve().name)
    store = RunFolder(path)
    continues_run = _check_owner(store, values)
    with store.locked():
        # Without a summary the run is unfinished. It stays so if this process is killed below, and
        # its newest checkpoint can be loaded.
        durable.remove(store.summary_file, path / CHECKSUMS, store.diverged_file)
        store.set_metrics(federation.history.records)
        facts = {
            "data": fingerprint(federation.data),
            "data_size": serialization.data_size(federation.data),
            "settings": federation.settings(),
        }
        store.save(tensors, federation.round, facts)
        newest = store.checkpoint(federation.round)
        durable.remove(*(other for other in store.checkpoints() if other != newest))
        store.write(store.config_file, tomli_w.dumps(values).encode())
        write_results(store, federation, config, values, {} if continues_run else _SAVED_FROM)
        durable.remove(path / serialization.FILE)  # of an earlier version
    return path


def write_results(
    store: RunFolder,
    federation: Federation,
    config: Config,
    values: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> None:
    """Writes all that predictions and the report need, and the summary if a round was trained.

    Args:
        store: the folder, which has config.toml and metrics.jsonl.
        federation: whose results are written.
        config: of the federation, with defaults for what a config cannot build.
        values: the settings in config.toml.
        facts: more entries of env.json.
    """
    data, engine = federation.data, engine_facts(federation.engine, 1)
    content = {**environment(config), "command": [], **engine, **facts}
    store.write(store.path / "env.json", json_bytes(content))
    clients = describe_clients(data, config.report.publish_clients)
    store.write(store.clients_file, compact_bytes(clients))
    model = model_facts(data, federation.model.user_loss)
    write_modes(store.modes_file, federation.ensemble, {"model": model, **category_facts(data)})
    record = federation.history.tested_at(federation.round) or {}
    calibration, prediction = None, None
    if federation.calibration is not None:
        calibration, prediction = describe_calibration(config, federation.ensemble, data)
    if "test" in record or prediction is not None:
        write_prediction_summary(config, store, federation.ensemble, data, prediction)
    else:
        durable.remove(store.predictions_file)
    if federation.round > 0:
        digest = sha256(dumps(values, sort_keys=True).encode()).hexdigest()[:12]
        summary = {
            **summarize(config, store, federation, record, calibration),
            "name": values["name"],
            "hash": digest if "python" in values else config.hash(),
            "data": fingerprint(data),
        }
        store.finish(summary)


def _check_owner(store: RunFolder, values: Mapping[str, Any]) -> bool:
    """Returns whether the folder holds a run of the command line that this federation continues.

    Raises if it holds another run of the command line. A saved federation may be replaced.
    """
    if not store.config_file.exists() or _saved_from_python(store):
        return False
    differing = set(store.differing_keys(values)) - _MAY_DIFFER
    if differing:
        raise StoreError(
            f"{store.path} holds a run of the command line with other settings "
            f"({', '.join(sorted(differing)[:5])}), which is not replaced. Save to another folder."
        )
    return True


def _saved_from_python(store: RunFolder) -> bool:
    environment_file = store.path / "env.json"
    if not environment_file.exists():
        return False
    return _SAVED_FROM.items() <= read_table(environment_file).items()
