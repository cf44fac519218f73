"""Validates the tables of plug-ins: names, keys, types, and whether the plug-in can be built.

Each function appends the problems that it finds to the list `problems`, so that one message can
report all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import ValidationError

from ..arguments import check_names
from ..core.aggregator import check_aggregator as check_rule
from ..core.average import check_average as check_predictors
from ..core.engine import ENGINE_ARGUMENTS, engines
from ..core.parameters.shared_checks import check_sharing
from ..core.schedule import Schedule
from ..data import partitions
from ..data.schema import Schema
from ..data.sources.user_file import knows_clients
from ..errors import InputError, unknown
from ..registry import Registry
from .hints import suggest_keys
from .messages import sentence
from .plugin_tables import parameters
from .plugins import (
    AGGREGATOR,
    ALGORITHM,
    ATTACK,
    AVERAGE,
    DATA,
    ENGINE,
    MODEL,
    OPTIMIZER,
    PARTICIPATION,
    PluginTable,
    algorithm_schema,
    as_table,
    build_aggregator,
    build_algorithm,
    build_attack,
    build_average,
    build_optimizer,
    build_participation,
)


def check_data(settings: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Returns the table `[data]` with its defaults."""
    if settings.get("source") == "schema":
        settings.setdefault("partition", "natural")  # the clients of a fleet are its sites
    if knows_clients(settings):
        settings.setdefault("partition", "natural")
    names = _plugin_names(DATA, settings, problems)
    table, valid = _fill_defaults("data", settings, names and DATA.schema(names), problems)
    if valid and table["source"] == "schema":
        try_build("data", lambda: Schema.from_options(table), problems)
    if valid and table["clients"] is None and not _clients_optional(table["partition"]):
        problems.append(
            f"data.clients: is missing; partition '{table['partition']}' needs a number of clients."
        )
    return table


def _clients_optional(partition: str) -> bool:
    """Returns whether `clients` may be left out: for "natural", and for a default in a plug-in."""
    return partition == "natural" or parameters(partitions[partition])["clients"][1] is not ...


def check_model(settings: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Returns the table `[model]` with its defaults."""
    names = _plugin_names(MODEL, settings, problems)
    return _fill_defaults("model", settings, names and MODEL.schema(names), problems)[0]


def check_algorithm(settings: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Returns the table `[algorithm]` with its defaults."""
    optimizer = settings["optimizer"] = as_table(OPTIMIZER.path, settings.get("optimizer", {}))
    algorithm_names = _plugin_names(ALGORITHM, settings, problems)
    if isinstance(optimizer, Mapping):
        optimizer = settings["optimizer"] = dict(optimizer)
        optimizer_names = _plugin_names(OPTIMIZER, optimizer, problems)
    else:
        # Any valid name will do here: the schema below reports that this is not a table.
        optimizer_names = (OPTIMIZER.choices[0].default,)
    table_schema = None
    if algorithm_names and optimizer_names:
        table_schema = algorithm_schema(algorithm_names, optimizer_names)
    table, valid = _fill_defaults("algorithm", settings, table_schema, problems)
    if valid:
        optimizer_valid = try_build(
            "algorithm.optimizer", lambda: build_optimizer(table["optimizer"]), problems
        )
        # With an invalid optimizer, use a default one to find the problems of the algorithm, too.
        buildable = table if optimizer_valid else {**table, "optimizer": {"name": "sgd"}}
        try_build("algorithm", lambda: build_algorithm(buildable), problems)
    return table


def check_participation(settings: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Returns the table `[participation]` with its defaults."""
    return _check_table(PARTICIPATION, build_participation, settings, problems)


def check_aggregator(settings: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Returns the table `[aggregator]` with its defaults."""
    return _check_table(AGGREGATOR, build_aggregator, settings, problems)


def check_compatible(algorithm: Any, aggregator: Any, average: Any, problems: list[str]) -> None:
    """Checks that the algorithm supports the aggregator and the average.

    This is skipped if there are problems already.
    """
    if problems or not isinstance(algorithm, Mapping):
        return
    method = build_algorithm(algorithm)
    if isinstance(aggregator, Mapping):
        rule = build_aggregator(aggregator)
        try_build("aggregator", lambda: check_rule(rule, method, torch.zeros(1)), problems)
    if isinstance(average, Mapping):
        mean = build_average(average)
        try_build("average", lambda: check_predictors(mean, method), problems)


def check_shared(algorithm: Any, schedule: Schedule, problems: list[str]) -> None:
    """Checks that modes can share parameters; skipped if there are problems already."""
    if isinstance(algorithm, Mapping) and not problems:
        method = build_algorithm(algorithm)
        # More than one value, to tell a vector of parameters from a single value.
        try_build(
            "ensemble.shared", lambda: check_sharing(method, schedule, torch.zeros(7)), problems
        )


def check_attack(settings: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Returns the table `[attack]` with its defaults."""
    return _check_table(ATTACK, build_attack, settings, problems)


def check_average(settings: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Returns the table `[average]` with its defaults."""
    return _check_table(AVERAGE, build_average, settings, problems)


def _check_table(
    section: PluginTable,
    build: Callable[[dict[str, Any]], Any],
    settings: dict[str, Any],
    problems: list[str],
) -> dict[str, Any]:
    """Returns the table of a plug-in with its defaults, after building the plug-in once."""
    name = section.path[0]
    names = _plugin_names(section, settings, problems)
    table, valid = _fill_defaults(name, settings, names and section.schema(names), problems)
    if valid:
        try_build(name, lambda: build(table), problems)
    return table


def check_engine(settings: Any, problems: list[str]) -> None:
    """Checks the name of the engine, and the names of its options."""
    table = dict(settings) if isinstance(settings, Mapping) else {}
    names, options = _plugin_names(ENGINE, table, problems), table.get("options")
    if names and isinstance(options, Mapping):
        owner, engine = f"engine '{names[0]}'", engines[names[0]]
        try_build(
            "engine.options",
            lambda: check_names(owner, engine, options, ENGINE_ARGUMENTS),
            problems,
        )


def _plugin_names(
    section: PluginTable, settings: dict[str, Any], problems: list[str]
) -> tuple[str, ...]:
    """Returns the names of the plug-ins of a table, or () if one of them is not registered.

    Names that are missing in `settings` are set to their defaults.
    """
    path = ".".join(section.names_at)
    for choice in section.choices:
        settings.setdefault(choice.key, choice.default)
    registered = [
        check_registered(f"{path}.{choice.key}", settings[choice.key], choice.registry, problems)
        for choice in section.choices
    ]
    return tuple(settings[choice.key] for choice in section.choices) if all(registered) else ()


def _fill_defaults(
    name: str, settings: dict[str, Any], table_schema: Any, problems: list[str]
) -> tuple[dict[str, Any], bool]:
    """Returns a table with its defaults, and whether the plug-in can be built from it.

    Args:
        table_schema: a class derived from `Table`, or an empty value if a plug-in is not known.
    """
    if not table_schema:
        return settings, False
    try:
        return table_schema.model_validate(settings).model_dump(), True
    except ValidationError as error:
        problems += [sentence(item, table_schema, name, suggest_keys) for item in error.errors()]
        known = {key: value for key, value in settings.items() if key in table_schema.model_fields}
        if len(known) == len(settings):
            return settings, False
        # Without the unknown keys the table may be valid. Then the plug-in can be built, which
        # finds more problems. The problems of the known keys are already in the list.
        return _fill_defaults(name, known, table_schema, [])


def try_build(key: str, build: Callable[[], Any], problems: list[str]) -> bool:
    """Calls `build`; returns whether it succeeds."""
    try:
        build()
    except InputError as error:
        problems.append(f"{key}: {error}")
        return False
    return True


def check_registered(key: str, name: Any, registry: Registry[Any], problems: list[str]) -> bool:
    """Returns whether the registry has this name."""
    if isinstance(name, str) and name in registry:
        return True
    text = unknown(registry.kind, str(name), registry)
    if "did you mean" not in text:  # then it is no typo of a known name
        text += f" A {registry.kind} of another package is known where that package is installed."
    problems.append(f"{key}: {text}")
    return False
