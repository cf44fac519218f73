"""Checks the tables of plug-ins: names, keys, types, and whether the thing can be made; problems
are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import ValidationError

from ..arguments import check_names
from ..core.aggregator import check_aggregator as check_rule
from ..core.engine import engines
from ..data import partitions
from ..errors import InputError, unknown
from ..registry import Registry
from .messages import sentence
from .plugin_tables import parameters, schema
from .plugins import (
    AGGREGATOR,
    ALGORITHM,
    ATTACK,
    DATA,
    ENGINE,
    GIVEN_TO_ENGINES,
    MODEL,
    OPTIMIZER,
    PARTICIPATION,
    Section,
    as_table,
    build_aggregator,
    build_algorithm,
    build_attack,
    build_optimizer,
    build_participation,
)


def check_data(given: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The table `[data]` with its defaults."""
    made = _names(DATA, given, problems)
    table, good = _filled("data", given, made and DATA.schema(made), problems)
    if good and table["clients"] is None and not _knows_its_clients(table["partition"]):
        problems.append(
            f"data.clients: is missing; partition '{table['partition']}' needs a number of clients."
        )
    return table


def _knows_its_clients(partition: str) -> bool:
    """Whether clients may be left out: for "natural", and where a partition of another package has
    a default.
    """
    return partition == "natural" or parameters(partitions[partition])["clients"][1] is not ...


def check_model(given: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The table `[model]` with its defaults."""
    made = _names(MODEL, given, problems)
    return _filled("model", given, made and MODEL.schema(made), problems)[0]


def check_algorithm(given: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The table `[algorithm]` with its defaults."""
    inner = given["optimizer"] = as_table("optimizer", given.get("optimizer", {}))
    method = _names(ALGORITHM, given, problems)
    if isinstance(inner, Mapping):
        inner = given["optimizer"] = dict(inner)
        chosen = _names(OPTIMIZER, inner, problems)
    else:
        chosen = (OPTIMIZER.choices[0].default,)  # the schema says that this is no table
    made = None
    if method and chosen:
        made = schema(
            "algorithm", {**ALGORITHM.options(method), "optimizer": (OPTIMIZER.schema(chosen), ...)}
        )
    table, good = _filled("algorithm", given, made, problems)
    if good:
        sound = tried("algorithm.optimizer", lambda: build_optimizer(table["optimizer"]), problems)
        usual = table if sound else {**table, "optimizer": {"name": "sgd"}}
        tried("algorithm", lambda: build_algorithm(usual), problems)
    return table


def check_participation(given: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The table `[participation]` with its defaults."""
    return _checked(PARTICIPATION, build_participation, given, problems)


def check_aggregator(given: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The table `[aggregator]` with its defaults."""
    return _checked(AGGREGATOR, build_aggregator, given, problems)


def check_fit(algorithm: Any, aggregator: Any, problems: list[str]) -> None:
    """Whether a method can take an aggregator; both tables are good by themselves."""
    if isinstance(algorithm, Mapping) and isinstance(aggregator, Mapping) and not problems:
        rule, method = build_aggregator(aggregator), build_algorithm(algorithm)
        tried("aggregator", lambda: check_rule(rule, method, torch.zeros(1)), problems)


def check_attack(given: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The table `[attack]` with its defaults."""
    return _checked(ATTACK, build_attack, given, problems)


def _checked(
    section: Section,
    build: Callable[[dict[str, Any]], Any],
    given: dict[str, Any],
    problems: list[str],
) -> dict[str, Any]:
    """The table of a part that is chosen by name, with its defaults."""
    made = _names(section, given, problems)
    table, good = _filled(section.path[0], given, made and section.schema(made), problems)
    if good:
        tried(section.path[0], lambda: build(table), problems)
    return table


def check_engine(given: Any, problems: list[str]) -> None:
    """The engine's name, and the names of its options."""
    table = dict(given) if isinstance(given, Mapping) else {}
    names, options = _names(ENGINE, table, problems), table.get("options")
    if names and isinstance(options, Mapping):
        owner, engine = f"engine '{names[0]}'", engines[names[0]]
        tried(
            "engine.options",
            lambda: check_names(owner, engine, options, GIVEN_TO_ENGINES),
            problems,
        )


def _names(section: Section, given: dict[str, Any], problems: list[str]) -> tuple[str, ...]:
    """The names a table gives, filled in where it gives none; empty if one of them is not known."""
    at = ".".join(section.names_at)
    for choice in section.choices:
        given.setdefault(choice.key, choice.default)
    good = [
        named(f"{at}.{choice.key}", given[choice.key], choice.registry, problems)
        for choice in section.choices
    ]
    return tuple(given[choice.key] for choice in section.choices) if all(good) else ()


def _filled(
    name: str, given: dict[str, Any], made: Any, problems: list[str]
) -> tuple[dict[str, Any], bool]:
    """A plug-in's table with its defaults, and whether it is good; what is wrong with it goes to
    `problems`.
    """
    if not made:
        return given, False
    try:
        return made.model_validate(given).model_dump(), True
    except ValidationError as error:
        problems += [sentence(item, made, name) for item in error.errors()]
        known = {key: value for key, value in given.items() if key in made.model_fields}
        # is the rest good?
        return (given, False) if len(known) == len(given) else _filled(name, known, made, [])


def tried(key: str, make: Callable[[], Any], problems: list[str]) -> bool:
    """Whether something can be made; why not goes to `problems`."""
    try:
        make()
    except InputError as error:
        problems.append(f"{key}: {error}")
        return False
    return True


def named(key: str, name: Any, known: Registry[Any], problems: list[str]) -> bool:
    """Whether there is something of this name; if not, `problems` say what there is."""
    if isinstance(name, str) and name in known:
        return True
    problems.append(f"{key}: {unknown(known.kind, str(name), known)}")
    return False
