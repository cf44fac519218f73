"""The config of a federation that was made in Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from json import dumps
from typing import Any

from ..config.messages import LONGEST_NAME, NAME
from ..config.plugins import (
    build_aggregator,
    build_algorithm,
    build_attack,
    build_average,
    build_participation,
)
from ..config.python_parts import KEY, PLACES, without_parts
from ..config.schema import Config, check, plain
from ..errors import InputError
from ..federation import serialization
from ..federation.federation import Federation
from ..federation.named_models import describe_model, model_facts
from ..federation.spec import to_spec
from ..modeling.factory import ModelSpec

_SCHEDULE = ("name", "modes", "strata", "clients_per_round")  # all that a config has of one
_BUILD: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "algorithm": build_algorithm,
    "participation": build_participation,
    "aggregator": build_aggregator,
    "attack": build_attack,
    "average": build_average,
}
# Components that a config does not mention: the defaults of `Federation`.
_DEFAULTS = {
    "participation": {"name": "everybody", "stragglers": None},
    "aggregator": {"name": "mean"},
    "average": {"name": "none"},
}


def describe_federation(federation: Federation, name: str) -> tuple[dict[str, Any], Config]:
    """Returns the settings for config.toml, and a config with defaults for what it cannot build.

    If everything can be built from a config, the settings are those of that config. Otherwise their
    key `python` lists the parts that cannot.

    Args:
        name: of the run, unless the federation was loaded from one.
    """
    stored = federation.settings()
    values, missing = _describe_parts(federation, stored)
    name = name if re.match(NAME, name) and len(name) <= LONGEST_NAME else "federation"
    # A run that was loaded keeps its name, its trackers, what it publishes, and the exact spelling
    # of all settings that `load` did not change.
    kept = federation.run_settings
    values = {"name": name, **values, **kept, "rounds": max(federation.round, 1)}
    if federation.history.test_every is not None:
        values["evaluation"] = {
            **kept.get("evaluation", {}),
            "every": federation.history.test_every,
        }
    missing = [part for part in missing if PLACES[part][0] not in kept]
    for part in PLACES:
        table = PLACES[part][0]
        alone = without_parts({table: values.get(table)}, *missing)
        if (
            part not in missing
            and alone.get(table) is not None
            and not _builds(part, alone, stored)
        ):
            missing.append(part)
    config, problems = check(without_parts(values, *missing))
    if "data" in missing:  # the rows to calibrate by are part of the data
        values.pop("calibration", None)
        config, problems = check(without_parts(values, *missing))
    if config is None:  # parts that are valid by themselves, but not together
        missing = list(PLACES)
        config, problems = check(without_parts(values, *missing))
    if config is None:
        raise InputError(f"This federation cannot be saved: {'; '.join(problems)}")
    if not missing:
        return config.values(), config
    described = {key: values[key] for key in values if key not in config.values()}
    for part in missing:
        table, *key = PLACES[part]
        described[table] = (
            {**config.values()[table], key[0]: values[table][key[0]]} if key else values[table]
        )
    return plain({**config.values(), **described, KEY: sorted(missing)}), config


def _builds(part: str, table: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Returns whether a config with this table alone is valid and builds the same component.

    An option that is None and has another default is an example of what a config cannot say.
    """
    config = check(table)[0]
    if config is None or part not in _BUILD:
        return config is not None
    component = _BUILD[part](config.values()[part])
    return dumps(to_spec(component), sort_keys=True) == dumps(stored[part], sort_keys=True)


def _describe_parts(
    federation: Federation, stored: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of a federation, and the parts that a config cannot build.

    Args:
        stored: the federation's arguments, as `Federation.settings` returns them.
    """
    data = federation.data
    facts = model_facts(data, federation.model.user_loss)
    model = describe_model(federation.model.factory, facts)
    schedule = stored["schedule"] or {}
    missing = [
        part
        for part, value in {
            **{name: stored[name] for name in (*_DEFAULTS, "algorithm", "attack", "loss")},
            "model": model,
            "data": data.recipe,
            # A schedule with options of its own has no place in a config.
            "schedule": schedule if len(schedule) == len(_SCHEDULE) else None,
        }.items()
        if not value
    ]
    values: dict[str, Any] = {
        "seed": federation.seed,
        "model": model or {"name": _name(federation.model.factory)},
        "data": data.recipe or {"source": "python", "partition": "python", "clients": len(data)},
        "algorithm": stored["algorithm"] or {"name": _name(type(federation.algorithm.base))},
        "ensemble": {
            "modes": federation.schedule.modes,
            "strata": federation.schedule.strata,
            "clients_per_round": federation.schedule.clients_per_round,
            "schedule": schedule.get("name", _name(type(federation.schedule))),
            "shared": stored["shared"] or None,
            "personal": stored["personal"] or None,
            "alternate": stored["alternate"] or None,
            "combine": stored["combine"],
            "dropout_samples": stored["dropout_samples"] or None,
        },
        "training": {
            **{key: stored[key] for key in ("epochs", "steps", "batch_size", "last_batch")},
            "loss": stored["loss"] or _name(federation.model.user_loss),
        },
        "engine": {
            "name": stored["engine"],
            "options": stored["engine_options"],
            "device": stored["device"],
            "dtype": stored["dtype"],
        },
    }
    for name, default in {**_DEFAULTS, "attack": serialization.NO_ATTACK}.items():
        if stored[name] is None:
            values[name] = {"name": _name(type(getattr(federation, name)))}
        elif stored[name] != default:
            values[name] = stored[name]
    return values, missing


def settings_without(values: Mapping[str, Any], changed: set[str]) -> dict[str, Any]:
    """Returns the settings of a run folder, without the tables that changed arguments are in.

    Args:
        changed: arguments of `Federation.load`.
    """
    engine = {"engine_options", "device"}
    predictions = {"combine", "dropout_samples"}
    tables = {PLACES["engine" if name in engine else name][0] for name in changed - predictions}
    tables |= {"ensemble"} if changed & predictions else set()
    # The tables of parts that a config cannot build are described again from the objects.
    tables |= {PLACES[part][0] for part in values.get(KEY, ()) if part in PLACES}
    return {key: value for key, value in values.items() if key not in {*tables, KEY, "rounds"}}


def _name(made: Any) -> str:
    """Returns the name of a class or a function for readers."""
    made = made.model if isinstance(made, ModelSpec) else getattr(made, "func", made)
    name = getattr(made, "__name__", type(made).__name__)
    return "lambda" if name == "<lambda>" else str(name)
