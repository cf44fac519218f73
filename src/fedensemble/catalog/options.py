"""Options of all registered plug-ins, taken from their signatures and docstrings."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from ..config.plugin_tables import field_parameters
from ..config.plugins import GIVEN_TO_PARTITIONS
from ..core.aggregator import aggregators
from ..core.algorithm import Algorithm, algorithms
from ..core.attack import attacks
from ..core.average import averages
from ..core.engine import ENGINE_ARGUMENTS, engines
from ..core.optimizer import Optimizer, optimizers
from ..core.participation import participations
from ..core.schedule import Schedule, schedules
from ..data import datasets, partitions
from ..federation.named_models import GIVEN_TO_MODELS
from ..models import models
from ..registry import Registry

Option = dict[str, Any]  # keys: name, values, default (missing if the option is required), what
HEADER = ("option", "values", "default", "what")


@dataclass(frozen=True)
class Kind:
    """A kind of plug-ins, and how a config passes options to them.

    Attributes:
        registry: the plug-ins by name.
        place: a sentence on where the options go in a config.
        hidden: parameters that are not set by options of the plug-in.
        common: options that all plug-ins of the kind have; they are documented once.
    """

    registry: Registry[Any]
    place: str
    hidden: tuple[str, ...] = ()
    common: tuple[str, ...] = ()


_COMMON = tuple(field.name for field in fields(Algorithm))
_OF_SCHEDULES = tuple(field.name for field in fields(Schedule))
KINDS = {
    "algorithms": Kind(
        algorithms, f"options go into [algorithm]; all take {', '.join(_COMMON)}", (), _COMMON
    ),
    "optimizers": Kind(optimizers, "options go into [algorithm.optimizer]"),
    "datasets": Kind(
        datasets, "options go into [data]; random datasets also use its seed", ("seed",)
    ),
    "partitions": Kind(
        partitions, "options go into [data]; all use its clients and seed", GIVEN_TO_PARTITIONS
    ),
    "models": Kind(models, "options go into [model]", GIVEN_TO_MODELS),
    "schedules": Kind(
        schedules, f"all take {', '.join(_OF_SCHEDULES)} of [ensemble]", _OF_SCHEDULES
    ),
    "participations": Kind(participations, "options go into [participation]"),
    "aggregators": Kind(aggregators, "options go into [aggregator]"),
    "attacks": Kind(attacks, "options go into [attack]; simulation only"),
    "averages": Kind(averages, "options go into [average]; they change predictions only"),
    "engines": Kind(engines, "options go into [engine.options]", ENGINE_ARGUMENTS),
}


def summary(item: Any) -> str:
    """Returns the first paragraph of a docstring, on one line."""
    return (inspect.getdoc(item) or "").split("\n\n")[0].replace("\n", " ")


def options(kind: Kind, item: Any) -> list[Option]:
    """Returns the options of a plug-in, in the order of its signature."""
    docs = explanations(item)
    records = []
    for name, (hint, default) in field_parameters(item).items():
        if name in kind.hidden:
            continue
        option = {"name": name, "values": describe_type(hint)}
        option |= {} if default is ... else {"default": _plain(default)}
        records.append(option | {"what": docs.get(name, "")})
    return records


def explanations(item: Any) -> dict[str, str]:
    """Returns the texts of a docstring's Args by name; for a class, also those of its bases.

    >>> from fedensemble.data.partitioning.dirichlet import quantity
    >>> explanations(quantity)["beta"]
    'concentration; with a smaller value the sizes differ more.'
    """
    docs: dict[str, str] = {}
    for owner in reversed(item.__mro__) if inspect.isclass(item) else (item,):
        _, _, section = inspect.cleandoc(owner.__doc__ or "").partition("Args:\n")
        names: list[str] = []
        for line in section.split("\n\n")[0].splitlines():
            if not line.startswith(" " * 4):
                break
            if line.startswith(" " * 8):  # a continuation line
                docs |= {name: f"{docs[name]} {line.strip()}" for name in names}
                continue
            before, _, text = line.partition(": ")
            names = before.strip().split(", ")
            docs |= dict.fromkeys(names, text.strip())
    return docs


def describe_type(hint: Any) -> str:
    """Returns a type hint in the words of a config file.

    >>> describe_type(float | None), describe_type(Literal["I", "II"])
    ('number', '"I", "II"')
    >>> describe_type(Sequence[int])
    'list of integers'
    """
    plain = {bool: "true, false", int: "integer", float: "number", str: "text", Path: "path"}
    if hint in plain:
        return plain[hint]
    inner = [part for part in get_args(hint) if part not in (type(None), ...)]
    if get_origin(hint) is Literal:
        return ", ".join(map(json.dumps, inner))
    if get_origin(hint) in (Union, types.UnionType):
        parts = [part for part in inner if part is not str or Path not in inner]
        return " or ".join(dict.fromkeys(describe_type(part) for part in parts))
    if inspect.isclass(hint) and issubclass(hint, Optimizer):
        return "name or table"
    if inner:
        return f"list of {describe_type(inner[0])}s"
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
    """Returns the default as it is written in a config, "required", or "" for None."""
    if "default" not in option:
        return "required"
    return "" if option["default"] is None else json.dumps(option["default"])


def format_options(kind: Kind, item: Any) -> str:
    """Returns a plug-in's own options with their defaults, on one line."""
    texts = []
    for option in own_options(kind, item):
        text = default_text(option)
        texts.append(
            f"{option['name']} ({text})"
            if text == "required"
            else f"{option['name']} = {text}".rstrip(" =")
        )
    return ", ".join(texts)


def own_options(kind: Kind, item: Any) -> list[Option]:
    """Returns the options that not all plug-ins of the kind have, or whose default differs."""
    common = (
        {field.name: _plain(field.default) for field in fields(Algorithm)} if kind.common else {}
    )
    return [
        option
        for option in options(kind, item)
        if option["name"] not in common or option.get("default") != common[option["name"]]
    ]


def option_rows(records: Sequence[Option]) -> tuple[tuple[str, ...], ...]:
    """Returns one row of a table per option, with the columns `HEADER`."""
    return tuple(
        (option["name"], option["values"], default_text(option), option["what"])
        for option in records
    )
