"""Turns a config into objects; nothing else in the package ever sees a config."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..data import FederatedData, Source, partition, partitions, sources
from ..data.holdout import hold_out_validation, limit_test_set
from ..data.label_checks import advise_labels
from ..data.server_data import hold_out_server_inputs, load_server_inputs
from ..errors import AggregatorWarning, DataError, EngineWarning
from ..federation.federation import Federation
from ..federation.resolve import find_device
from ..modeling.factory import ModelSpec
from ..models import models
from ..runtime.oom import raise_on_oom
from .plugin_tables import parameters
from .plugins import (
    GIVEN_TO_MODELS,
    GIVEN_TO_PARTITIONS,
    build_aggregator,
    build_algorithm,
    build_attack,
    build_participation,
)
from .schema import Config

_SMALLER_DATA = "use fewer examples, a smaller type of numbers, or a machine with more memory"


def resolve_device(config: Config) -> Config:
    """The config with device "auto" replaced by the device it means here."""
    engine = config.engine.model_copy(update={"device": str(find_device(config.engine.device))})
    return config.model_copy(update={"engine": engine})


def data_table(config: Config) -> dict[str, Any]:
    """All that the data depend on: their settings, with the run's seed where they have none of
    their own.
    """
    own = config.data.get("seed")
    return {**config.data, "seed": config.seed if own is None else own}


def load_source(name: str, options: Mapping[str, Any]) -> Source:
    """The data before they are divided."""
    return sources[name](**options)


def build_data(
    config: Config, load: Callable[[str, Mapping[str, Any]], Source] = load_source
) -> FederatedData:
    """The clients' data. An option goes to whoever takes it: the source, the partition, or both."""
    table = data_table(config)
    split = partitions[table["partition"]]
    with raise_on_oom("The data do", torch.device("cpu"), _SMALLER_DATA):
        loaded = load(table["source"], _taken(table, parameters(sources[table["source"]])))
    if table.get("validation") is not None:
        loaded = hold_out_validation(loaded, table["validation"])
    if table.get("test_examples") is not None:
        loaded = limit_test_set(loaded, table["test_examples"])
    if table.get("server_share") is not None:
        loaded = hold_out_server_inputs(loaded, table["server_share"], table["seed"])
    if table.get("server_file") is not None:
        loaded = load_server_inputs(loaded, table["server_file"])
    options = _taken(table, parameters(split, GIVEN_TO_PARTITIONS))
    with raise_on_oom("The data do", torch.device("cpu"), _SMALLER_DATA):
        return partition(loaded, table["partition"], table["clients"], table["seed"], **options)


def _taken(table: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: table[name] for name in known if name in table and table[name] is not None}


def model_facts(data: FederatedData, loss: str) -> dict[str, Any]:
    """What a model must know of the data: the shape of an input and the number of outputs."""
    outputs = data.classes if loss == "cross_entropy" else int(data.y[0].numel())
    if outputs is None:
        advice = advise_labels(data.y) or 'For regression set training.loss = "mse".'
        raise DataError(
            f"Loss 'cross_entropy' needs integer labels, and the targets are floats. {advice}"
        )
    return {"shape": list(data.x.shape[1:]), "outputs": outputs}


def build_model(table: Mapping[str, Any], facts: Mapping[str, Any]) -> ModelSpec:
    """A callable that makes the model anew."""
    chosen = models[table["name"]]
    options = {name: value for name, value in table.items() if name != "name"}
    takes = parameters(chosen)
    options |= {name: facts[name] for name in GIVEN_TO_MODELS if name in takes}
    return ModelSpec(chosen, options)


def build_federation(config: Config, data: FederatedData) -> Federation:
    """The federation a config describes; its engine's notes are left to `run_notes`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineWarning)
        warnings.simplefilter("ignore", AggregatorWarning)
        return Federation(
            model=build_model(config.model, model_facts(data, config.training.loss)),
            data=data,
            algorithm=build_algorithm(config.algorithm),
            participation=build_participation(config.participation),
            aggregator=build_aggregator(config.aggregator),
            attack=build_attack(config.attack),
            engine=config.engine.name,
            engine_options=config.engine.options,
            device=config.engine.device,
            dtype=getattr(torch, config.engine.dtype),
            seed=config.seed,
            **config.ensemble.model_dump(),
            **config.training.model_dump(),
        )
