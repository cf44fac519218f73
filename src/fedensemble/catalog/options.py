"""The options of everything that has a name, from signatures and docstrings."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from ..config.plugin_tables import field_parameters
from ..config.plugins import GIVEN_TO_MODELS, GIVEN_TO_PARTITIONS
from ..core.aggregator import aggregators
from ..core.algorithm import Algorithm, algorithms
from ..core.attack import attacks
from ..core.engine import engines
from ..core.optimizer import Optimizer, optimizers
from ..core.participation import participations
from ..core.schedule import Schedule, schedules
from ..data import partitions, sources
from ..models import models
from ..registry import Registry

Option = dict[str, Any]  # name, values, default (left out where there is none), what
HEADER = ("option", "values", "default", "what")


@dataclass(frozen=True)
class Kind:
    """Things of one kind, and how they get their options in a config."""

    registry: Registry[Any]
    place: str
    given: tuple[str, ...] = ()  # taken from elsewhere
    common: tuple[str, ...] = ()  # options of all of them, told once


_COMMON = tuple(field.name for field in fields(Algorithm))
_OF_SCHEDULES = tuple(field.name for field in fields(Schedule))
KINDS = {
    "algorithms": Kind(
        algorithms, f"options go into [algorithm]; all take {', '.join(_COMMON)}", (), _COMMON
    ),
    "optimizers": Kind(optimizers, "options go into [algorithm.optimizer]"),
    "datasets": Kind(sources, "options go into [data]; those with chance take its seed", ("seed",)),
    "partitions": Kind(
        partitions, "options go into [data]; all take its clients and seed", GIVEN_TO_PARTITIONS
    ),
    "models": Kind(models, "options go into [model]", GIVEN_TO_MODELS),
    "schedules": Kind(
        schedules, f"all take {', '.join(_OF_SCHEDULES)} of [ensemble]", _OF_SCHEDULES
    ),
    "participations": Kind(participations, "options go into [participation]"),
    "aggregators": Kind(aggregators, "options go into [aggregator]"),
    "attacks": Kind(attacks, "options go into [attack]; simulation only"),
    "engines": Kind(
        engines, "options go into [engine.options]", ("learner", "data", "work", "seed")
    ),
}


def summary(item: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return (inspect.getdoc(item) or "").split("\n\n")[0].replace("\n", " ")


def options(kind: Kind, item: Any) -> list[Option]:
    """What one of a kind takes, in the order of its signature."""
    said = explanations(item)
    found = []
    for name, (hint, default) in field_parameters(item).items():
        if name in kind.given:
            continue
        option = {"name": name, "values": values(hint)}
        option |= {} if default is ... else {"default": _plain(default)}
        found.append(option | {"what": said.get(name, "")})
    return found


def explanations(item: Any) -> dict[str, str]:
    """The Args of a docstring by name; those of a class also have its ancestors'.

    >>> from fedensemble.data.partition import quantity
    >>> explanations(quantity)["beta"]
    'concentration; with a smaller value the sizes differ more.'
    """
    said: dict[str, str] = {}
    for owner in reversed(item.__mro__) if inspect.isclass(item) else (item,):
        _, _, section = inspect.cleandoc(owner.__doc__ or "").partition("Args:\n")
        names: list[str] = []
        for line in section.split("\n\n")[0].splitlines():
            if not line.startswith(" " * 4):
                break
            if line.startswith(" " * 8):
                said |= {name: f"{said[name]} {line.strip()}" for name in names}
                continue
            before, _, text = line.partition(": ")
            names = before.strip().split(", ")
            said |= dict.fromkeys(names, text.strip())
    return said


def values(hint: Any) -> str:
    """A type as a reader of configs knows it.

    >>> values(float | None), values(Literal["I", "II"]), values(Sequence[int])
    ('number', '"I", "II"', 'list of whole numbers')
    """
    plain = {bool: "true, false", int: "whole number", float: "number", str: "text", Path: "path"}
    if hint in plain:
        return plain[hint]
    inner = [part for part in get_args(hint) if part not in (type(None), ...)]
    if get_origin(hint) is Literal:
        return ", ".join(map(json.dumps, inner))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(
            dict.fromkeys(values(part) for part in inner if part is not str or Path not in inner)
        )
    if inspect.isclass(hint) and issubclass(hint, Optimizer):
        return "name or table"
    if inner:
        return f"list of {values(inner[0])}s"
    return getattr(hint, "__name__", str(hint))


def _plain(default: Any) -> Any:
    if isinstance(default, Optimizer):
        return optimizers.name_of(type(default))
    if isinstance(default, (tuple, list)):
        return [_plain(inner) for inner in default]
    return (
        default if default is None or isinstance(default, (bool, int, float, str)) else str(default)
    )


def default_text(option: Option) -> str:
    """A default as it stands in a config."""
    if "default" not in option:
        return "required"
    return "" if option["default"] is None else json.dumps(option["default"])


def in_brief(kind: Kind, item: Any) -> str:
    """One's own options with their defaults, on one line."""
    shown = []
    for option in own(kind, item):
        text = default_text(option)
        shown.append(
            f"{option['name']} ({text})"
            if text == "required"
            else f"{option['name']} = {text}".rstrip(" =")
        )
    return ", ".join(shown)


def own(kind: Kind, item: Any) -> list[Option]:
    """Options that not all of the kind have, or not with this default."""
    usual = (
        {field.name: _plain(field.default) for field in fields(Algorithm)} if kind.common else {}
    )
    return [
        o
        for o in options(kind, item)
        if o["name"] not in usual or o.get("default") != usual[o["name"]]
    ]


def option_rows(found: Sequence[Option]) -> tuple[tuple[str, ...], ...]:
    """A line for each option."""
    return tuple(
        (option["name"], option["values"], default_text(option), option["what"]) for option in found
    )
