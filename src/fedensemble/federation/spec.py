"""Registered parts as names and numbers, so that a file can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ..core.aggregator import aggregators
from ..core.algorithm import algorithms
from ..core.attack import attacks
from ..core.optimizer import optimizers
from ..core.participation import participations
from ..core.schedule import schedules
from ..errors import InputError
from ..registry import Registry

_REGISTRIES: tuple[Registry[Any], ...] = (
    algorithms,
    schedules,
    participations,
    optimizers,
    aggregators,
    attacks,
)


def describe(part: Any) -> dict[str, Any] | None:
    """A registered frozen dataclass as a name and its fields, or None if a file could not bring it
    back.
    """
    for registry in _REGISTRIES:
        name = registry.name_of(type(part))
        if name is not None and is_dataclass(part):
            values = {f.name: getattr(part, f.name) for f in fields(part)}
            inner = {
                key: describe(value) if is_dataclass(value) else value
                for key, value in values.items()
            }
            lost = any(inner[key] is None and is_dataclass(value) for key, value in values.items())
            return None if lost else {"name": name, **inner}
    return None


def from_spec(description: Mapping[str, Any]) -> Any:
    """The object that `describe` described."""
    values = {
        k: from_spec(v) if isinstance(v, Mapping) else v
        for k, v in description.items()
        if k != "name"
    }
    for registry in _REGISTRIES:
        if description["name"] in registry:
            return registry[description["name"]](**values)
    raise InputError(
        f"'{description['name']}' is not registered here; import the package that defines it first."
    )
