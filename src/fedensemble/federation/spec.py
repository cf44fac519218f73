"""Specifications of registered components: names and plain values that a file can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ..core.aggregator import aggregators
from ..core.algorithm import algorithms
from ..core.attack import attacks
from ..core.average import averages
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
    averages,
)


def to_spec(component: Any) -> dict[str, Any] | None:
    """The name and fields of a registered frozen dataclass; None if a file cannot restore it."""
    for registry in _REGISTRIES:
        name = registry.name_of(type(component))
        if name is not None and is_dataclass(component):
            values = {f.name: getattr(component, f.name) for f in fields(component)}
            specs = {
                key: to_spec(value) if is_dataclass(value) else value
                for key, value in values.items()
            }
            # A nested component without a specification, such as a user's own optimizer.
            lost = any(specs[key] is None and is_dataclass(value) for key, value in values.items())
            return None if lost else {"name": name, **specs}
    return None


def from_spec(spec: Mapping[str, Any]) -> Any:
    """The component that `to_spec` described."""
    values = {
        k: from_spec(v) if isinstance(v, Mapping) else v for k, v in spec.items() if k != "name"
    }
    for registry in _REGISTRIES:
        if spec["name"] in registry:
            return registry[spec["name"]](**values)
    raise InputError(
        f"'{spec['name']}' is not registered here; import the package that defines it first."
    )
