"""Parts of a federation saved from Python that a config cannot build.

The config.toml of a saved federation lists them as `python = ["model", "data"]`. What it says about
them, such as the name of a class, is for readers of the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "python"
# Where the config has each part; without a second key the whole table.
PLACES: dict[str, tuple[str, ...]] = {
    "model": ("model",),
    "data": ("data",),
    "algorithm": ("algorithm",),
    "schedule": ("ensemble", "schedule"),
    "participation": ("participation",),
    "aggregator": ("aggregator",),
    "attack": ("attack",),
    "average": ("average",),
    "loss": ("training", "loss"),
    "engine": ("engine",),
    "seed": ("seed",),
}


def python_parts(values: Mapping[str, Any]) -> list[str]:
    """Returns the parts that the settings in a config.toml cannot build."""
    parts = values.get(KEY, [])
    known = isinstance(parts, list) and all(isinstance(part, str) for part in parts)
    return [part for part in parts if part in PLACES] if known else []


def without_parts(values: Mapping[str, Any], *parts: str) -> dict[str, Any]:
    """Returns the settings without some parts, so that they have their defaults.

    Data have no complete default: without them, any number of clients stands in.
    """
    kept = {key: value for key, value in values.items() if key != KEY}
    for part in parts:
        table, *key = PLACES[part]
        if key and isinstance(kept.get(table), Mapping):
            kept[table] = {k: v for k, v in kept[table].items() if k != key[0]}
        elif not key:
            kept.pop(table, None)
    return {**kept, "data": kept.get("data", {"source": "digits", "clients": 1})}


def describe_parts(values: Mapping[str, Any], where: str) -> str:
    """Returns why the command line cannot train these settings, and what to do."""
    parts = python_parts(values)
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
    arguments = ", ".join(f"{part}=..." for part in parts if part not in ("seed", "engine"))
    return (
        f"{where} is of a federation that was saved from Python, and its {listed} cannot be built "
        f"from a config. Continue it in Python: fedensemble.Federation.load(folder, {arguments})."
    )
