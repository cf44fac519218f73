"""Loads a federation from a run folder, or from the file of an earlier version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint_file import read_checkpoint
from ..config.build import build_data, federation_arguments
from ..config.python_parts import python_parts, without_parts
from ..config.schema import Config, resolve
from ..data import FederatedData
from ..errors import InputError, StoreError, config_keys
from ..federation import serialization
from ..federation.federation import Federation
from ..federation.named_models import build_model, model_facts
from ..federation.resolve import Spec
from ..flat_params import Tree
from ..modeling.factory import ModelFactory
from ..text import as_path
from ..uncertainty.calibration import Calibration
from .federation_config import settings_without
from .setup import fingerprint
from .storage.ensemble_file_checks import check_facts
from .storage.read_json import need_numbers
from .storage.run_folder import RunFolder

Record = dict[str, Any]


def load_federation(
    make: type[Federation],
    folder: str | Path,
    model: ModelFactory | Spec | None,
    data: FederatedData | None,
    changes: Mapping[str, Any],
) -> Federation:
    """Returns the federation in a folder; see `Federation.load`."""
    serialization.check_changes(changes)
    store = RunFolder(as_path(folder))
    file, tensors, facts, records = _read_newest(store)
    values = store.read_config() if store.config_file.exists() else {}
    if values and store.done:  # an edited config could change the training without any error
        store.require_unchanged("config.toml")
    changed = {*changes} | ({"model"} if model is not None else set())
    if data is None:
        data = _build_data(store, values, facts)
    elif values and fingerprint(data) != facts.get("data"):
        changed.add("data")
    if "settings" in facts or not values:
        arguments = serialization.read_arguments(store.path, file, facts, data, changes)
    else:  # a run of the command line
        need_numbers(file, facts, ("round",), "its metadata")
        arguments = {**federation_arguments(_config(store, values)), **changes}
    if model is None:
        model = _build_model(store, values, data)
    federation = make(model, data, **arguments)
    # An average of another kind starts with the next round.
    if "average" in changes:
        tensors = serialization.replace_average(tensors, federation.state.average)
    # An engine with another name or other options makes its own numerical choices.
    if {"engine", "engine_options"} & {*changes}:
        tensors = {name: value for name, value in tensors.items() if not name.startswith("engine/")}
    federation.restore(tensors, facts["round"])
    federation.history.records = records
    # Other models, data or averages make other predictions.
    if not {*changes} - {"engine", "engine_options", "device"} and "data" not in changed:
        federation.restore_calibration(_read_calibration(store, facts["round"]))
    federation.run_settings = settings_without(values, changed)
    return federation


def _read_newest(store: RunFolder) -> tuple[Path, Tree, dict[str, Any], list[Record]]:
    """Returns path, tensors, metadata and records of the newest checkpoint in a folder."""
    store.refuse_distilled()
    if newest := store.newest():
        return newest
    if store.config_file.exists() and not (store.path / serialization.FILE).exists():
        raise StoreError(f"The run in {store.path} has no checkpoint yet.")
    # Earlier versions wrote only this file; it has no records.
    file = store.path / serialization.FILE
    if not file.exists():
        missing = "There is no folder" if not store.path.exists() else "There is no federation in"
        raise StoreError(
            f"{missing} {store.path}. Give the folder that Federation.save() returned, or that of "
            "a run of the command line."
        )
    return file, *read_checkpoint(file), []


def _read_calibration(store: RunFolder, round: int) -> Calibration | None:
    """Returns the calibration of a finished run's modes; None if there is none, or none of these.

    Args:
        round: of the checkpoint that is loaded.
    """
    if not store.done or not store.modes_file.exists() or store.summary()["rounds"] != round:
        return None
    facts = check_facts(store.modes_file, read_checkpoint(store.modes_file)[1])
    made: Calibration | None = facts["calibration"]
    return made


def _config(store: RunFolder, values: Mapping[str, Any], *without: str) -> Config:
    """Returns the config of a folder; parts without which it is asked for have their defaults."""
    return resolve(without_parts(values, *without) if without else values, str(store.config_file))


def _build_data(
    store: RunFolder, values: Mapping[str, Any], facts: Mapping[str, Any]
) -> FederatedData:
    """Returns the data that the settings of a folder describe; raises if they have changed."""
    parts = python_parts(values)
    if not values or "data" in parts:
        raise InputError(
            f"{store.path} does not say how to make its data: pass data=... to load()."
        )
    with config_keys():
        data = build_data(_config(store, values, *parts))
    if fingerprint(data) != facts.get("data"):
        raise StoreError(
            f"{store.path} was trained on other data than its config makes, or the data have "
            "changed since: pass data=... to load()."
        )
    return data


def _build_model(store: RunFolder, values: Mapping[str, Any], data: FederatedData) -> ModelFactory:
    """Returns the registered model that the settings of a folder name."""
    parts = python_parts(values)
    if not values or "model" in parts:
        name = f" ('{values['model']['name']}')" if values else ""
        raise InputError(
            f"The model{name} saved in {store.path} is not a registered one: pass model=... to "
            "load()."
        )
    config = _config(store, values, *parts)
    return build_model(config.model, model_facts(data, config.training.loss))
