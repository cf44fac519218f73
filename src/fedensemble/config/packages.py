"""Packages other than fedensemble whose plug-ins a config uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..core.schedule import schedules
from ..errors import InputError
from .plugins import PLUGIN_TABLES, as_table


def find_packages(values: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns name and version of the package of each plug-in that is not part of fedensemble.

    The keys are what messages call the plug-ins, such as "model 'triage'".

    Args:
        values: of a config, as `Config.values` returns them.
    """
    found = {}
    for kind, name, package in _plugins(values):
        if package is not None:
            found[f"{kind} '{name}'"] = package
    return found


def _plugins(values: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[str, str] | None]]:
    for section in PLUGIN_TABLES:
        table: Any = values
        for depth, key in enumerate(section.names_at, 1):
            path = section.names_at[:depth]
            table = as_table(path, table.get(key)) if isinstance(table, Mapping) else None
        for choice in section.choices if isinstance(table, Mapping) else ():
            name = str(table.get(choice.key, choice.default))
            yield choice.registry.kind, name, choice.registry.package(name)
    name = str(values.get("ensemble", {}).get("schedule", ""))
    yield schedules.kind, name, schedules.package(name)


def require_packages(packages: Mapping[str, Any], user: str) -> None:
    """Raises InputError if this machine lacks a package of a plug-in.

    Args:
        packages: name and version of the package of each plug-in, as `find_packages` returns them.
        user: what uses the plug-ins, for the message.
    """
    for plug_in, (name, number) in packages.items():
        try:
            version(name)
        except PackageNotFoundError:
            raise InputError(
                f"{user} uses the {plug_in} of the package '{name}' (version {number}), which is "
                "not installed on this machine: install it with pip."
            ) from None
