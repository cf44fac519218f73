"""Builds the data, the model and the federation that a config describes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..data import Dataset, FederatedData, datasets, partition, partitions
from ..data.recipe import with_recipe
from ..data.splits.holdout import hold_out_validation, limit_test_set
from ..data.splits.server_data import hold_out_server_inputs, load_server_inputs
from ..errors import AggregatorWarning, EngineWarning, config_keys
from ..federation.federation import Federation
from ..federation.named_models import build_model as build_model  # noqa: PLC0414
from ..federation.named_models import model_facts as model_facts  # noqa: PLC0414
from ..federation.resolve import select_device
from ..runtime.oom import raise_on_oom
from .plugin_tables import parameters
from .plugins import (
    GIVEN_TO_PARTITIONS,
    build_aggregator,
    build_algorithm,
    build_attack,
    build_average,
    build_participation,
)
from .schema import Config

_OOM_ADVICE = "use fewer examples, a smaller dtype, or a machine with more memory"


def resolve_device(config: Config) -> Config:
    """Returns the config with device "auto" replaced by the device that is available."""
    engine = config.engine.model_copy(update={"device": str(select_device(config.engine.device))})
    return config.model_copy(update={"engine": engine})


def data_table(config: Config) -> dict[str, Any]:
    """Returns all settings that the data depend on.

    The seed is `data.seed`, or the seed of the run if `data.seed` is not set.
    """
    seed = config.data.get("seed")
    return {**config.data, "seed": config.seed if seed is None else seed}


def load_source(name: str, options: Mapping[str, Any]) -> Dataset:
    """Returns the dataset before it is divided among clients."""
    return datasets[name](**options)


def build_data(
    config: Config, load: Callable[[str, Mapping[str, Any]], Dataset] = load_source
) -> FederatedData:
    """Returns the data of the clients.

    Each option of `[data]` is passed to the dataset, to the partition, or to both, depending on
    their parameters.

    Args:
        load: loads a dataset by its name and options; a caller may pass a function with a cache.
    """
    table = data_table(config)
    partition_function = partitions[table["partition"]]
    with raise_on_oom("The data do", torch.device("cpu"), _OOM_ADVICE):
        source = load(
            table["source"], _select_options(table, parameters(datasets[table["source"]]))
        )
    if table.get("validation") is not None:
        source = hold_out_validation(source, table["validation"])
    if table.get("test_examples") is not None:
        source = limit_test_set(source, table["test_examples"])
    if table.get("server_share") is not None:
        source = hold_out_server_inputs(source, table["server_share"], table["seed"])
    if table.get("server_file") is not None:
        source = load_server_inputs(source, table["server_file"])
    options = _select_options(table, parameters(partition_function, GIVEN_TO_PARTITIONS))
    with raise_on_oom("The data do", torch.device("cpu"), _OOM_ADVICE):
        data = partition(source, table["partition"], table["clients"], table["seed"], **options)
        if table.get("new_clients") is not None:
            data = data.with_new_clients(table["new_clients"], table["seed"])
        if table.get("calibration") is not None:
            data = data.with_calibration(table["calibration"], table["seed"])
    return with_recipe(data, table)


def _select_options(table: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a table that are among the known options and not None."""
    return {name: table[name] for name in known if name in table and table[name] is not None}


def build_federation(config: Config, data: FederatedData) -> Federation:
    """Returns the federation that a config describes."""
    # The warnings are suppressed because `run_notes` reports the same notes in the record of the
    # run.
    with warnings.catch_warnings(), config_keys():
        warnings.simplefilter("ignore", EngineWarning)
        warnings.simplefilter("ignore", AggregatorWarning)
        model = build_model(config.model, model_facts(data, config.training.loss))
        return Federation(model, data, **federation_arguments(config))


def federation_arguments(config: Config) -> dict[str, Any]:
    """Returns the arguments of a federation that a config describes, without model and data."""
    return {
        "algorithm": build_algorithm(config.algorithm),
        "participation": build_participation(config.participation),
        "aggregator": build_aggregator(config.aggregator),
        "attack": build_attack(config.attack),
        "average": build_average(config.average),
        "engine": config.engine.name,
        "engine_options": config.engine.options,
        "device": config.engine.device,
        "dtype": getattr(torch, config.engine.dtype),
        "seed": config.seed,
        **config.ensemble.model_dump(),
        "dropout_samples": config.ensemble.dropout_samples or 0,
        **config.training.model_dump(),
    }
