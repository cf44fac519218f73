"""Tables whose options depend on the name of a plug-in, and the plug-ins built from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from ..core.aggregator import MEAN, Aggregator, aggregators
from ..core.algorithm import Algorithm, algorithms
from ..core.attack import Attack, attacks
from ..core.average import NO_AVERAGE, Average, averages
from ..core.engine import ENGINE_ARGUMENTS, engines
from ..core.optimizer import Optimizer, optimizers
from ..core.participation import Everybody, Participation, participations
from ..data import datasets, partitions
from ..federation.named_models import GIVEN_TO_MODELS
from ..models import models
from ..registry import Registry
from .plugin_tables import Parameter, Table, field_parameters, schema

# Parameters that the library passes to a partition, so that they are not options of its table.
GIVEN_TO_PARTITIONS = ("source", "clients", "seed")


class PluginKey(NamedTuple):
    """A key of the config whose value is the name of a plug-in, such as `model.name`."""

    key: str
    registry: Registry[Any]
    default: str
    excluded: tuple[str, ...] = ()  # parameters of the plug-in that are not options

    def options(self, name: str) -> dict[str, Parameter]:
        """Returns the options of the plug-in with this name."""
        accepted = field_parameters(self.registry[name])
        return {key: value for key, value in accepted.items() if key not in self.excluded}


class PluginTable(NamedTuple):
    """A table of the config with the options of the plug-ins that are named in it.

    Args:
        path: path of the table with the options, such as ("engine", "options").
        choices: keys that name the plug-ins. `[data]` has two: the dataset and the partition.
        names_at: path of the table with these keys; for most tables it is `path`.
        common: options that the table accepts with any plug-in.
    """

    path: tuple[str, ...]
    choices: tuple[PluginKey, ...]
    names_at: tuple[str, ...]
    common: dict[str, Parameter]

    def options(self, names: Sequence[str]) -> dict[str, Parameter]:
        """Returns the keys that the table accepts with these plug-ins."""
        known = {choice.key: (str, ...) for choice in self.choices} | self.common
        for choice, name in zip(self.choices, names, strict=True):
            known |= choice.options(name)
        return known | self.common

    def schema(self, names: Sequence[str]) -> type[Table]:
        """Returns the schema of the table with these plug-ins."""
        return _table_schema(self.path, tuple(names), self._plug_ins(names))

    def _plug_ins(self, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(
            choice.registry[name] for choice, name in zip(self.choices, names, strict=True)
        )

    def all_registered(self, names: Sequence[Any]) -> bool:
        """Returns whether all names are registered."""
        return all(
            isinstance(name, str) and name in choice.registry
            for choice, name in zip(self.choices, names, strict=True)
        )

    def accepts(self, names: Sequence[Any], key: str, value: Any) -> bool:
        """Returns whether the table with these plug-ins accepts this value of an option."""
        options = self.options(names) if self.all_registered(names) else {}
        try:
            return key in options and bool(
                schema(key, {key: options[key]}).model_validate({key: value})
            )
        except ValidationError:
            return False

    def any_accepts(self, key: str) -> bool:
        """Returns whether any registered plug-in has this option."""
        return any(
            key in choice.options(name) for choice in self.choices for name in choice.registry
        )


_COMMON_DATA: dict[str, Parameter] = {
    "clients": (PositiveInt | None, None),
    "seed": (NonNegativeInt | None, None),
    "validation": (float | None, None),
    "calibration": (float | None, None),
    "new_clients": (float | None, None),
    "test_examples": (PositiveInt | None, None),
    "server_share": (float | None, None),
    "server_file": (Path | None, None),
}


def _table_with_name(
    path: tuple[str, ...], registry: Registry[Any], default: str, excluded: tuple[str, ...] = ()
) -> PluginTable:
    """Returns a table whose key `name` is the name of one plug-in."""
    return PluginTable(path, (PluginKey("name", registry, default, excluded),), path, {})


_SOURCE = PluginKey("source", datasets, "digits")
_PARTITION = PluginKey("partition", partitions, "iid", GIVEN_TO_PARTITIONS)
_ENGINE_NAME = PluginKey("name", engines, "vector", ENGINE_ARGUMENTS)
DATA = PluginTable(("data",), (_SOURCE, _PARTITION), ("data",), _COMMON_DATA)
MODEL = _table_with_name(("model",), models, "mlp", GIVEN_TO_MODELS)
ALGORITHM = _table_with_name(("algorithm",), algorithms, "fedavg")
OPTIMIZER = _table_with_name(("algorithm", "optimizer"), optimizers, "sgd")
PARTICIPATION = _table_with_name(("participation",), participations, "devices")
AGGREGATOR = _table_with_name(("aggregator",), aggregators, "median")
ATTACK = _table_with_name(("attack",), attacks, "sign-flip")
AVERAGE = _table_with_name(("average",), averages, "ema")
ENGINE = PluginTable(("engine", "options"), (_ENGINE_NAME,), ("engine",), {})
PLUGIN_TABLES = (
    DATA,
    MODEL,
    ALGORITHM,
    OPTIMIZER,
    PARTICIPATION,
    AGGREGATOR,
    ATTACK,
    AVERAGE,
    ENGINE,
)


_TABLES = {table.path: table for table in PLUGIN_TABLES}


# Making a schema takes a millisecond or more, and a search checks a config for each of its trials.
# The plug-ins themselves are arguments, because a name may be registered again for another one.
@lru_cache
def _table_schema(
    path: tuple[str, ...], names: tuple[str, ...], plug_ins: tuple[Any, ...]
) -> type[Table]:
    """Returns the schema of the table at a path with these plug-ins."""
    return schema(path[-1], _TABLES[path].options(names))


def algorithm_schema(algorithm: Sequence[str], optimizer: Sequence[str]) -> type[Table]:
    """Returns the schema of `[algorithm]` with the table of its local optimizer.

    Args:
        algorithm, optimizer: the name of each, as a sequence of one.
    """
    return _algorithm_schema(
        tuple(algorithm), ALGORITHM._plug_ins(algorithm), OPTIMIZER.schema(optimizer)
    )


@lru_cache
def _algorithm_schema(
    names: tuple[str, ...], plug_ins: tuple[Any, ...], optimizer: type[Table]
) -> type[Table]:
    return schema("algorithm", {**ALGORITHM.options(names), "optimizer": (optimizer, ...)})


def drop_stale_options(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `under` without options of a plug-in that `over` replaces by another plug-in.

    An option is dropped if the new plug-in does not accept it, or accepts it with another type:
    `hidden` is a list for "mlp" and an integer for "lstm". Unknown options are kept so that
    validation can report the typo.
    """
    result = dict(under)
    for section in PLUGIN_TABLES:
        under_names, over_names = _table(result, section.names_at), _table(over, section.names_at)
        before = [under_names.get(choice.key, choice.default) for choice in section.choices]
        after = [
            over_names.get(choice.key, name)
            for choice, name in zip(section.choices, before, strict=True)
        ]
        options = _table(result, section.path)
        if before != after and options and section.all_registered(after):
            remaining = {
                key: value
                for key, value in options.items()
                if not _is_stale(section, key, value, before, after)
            }
            result = _replace_table(result, section.path, remaining)
    return result


def _is_stale(
    section: PluginTable, key: str, value: Any, before: Sequence[Any], after: Sequence[Any]
) -> bool:
    """Returns whether an option belongs to the plug-ins `before` and does not fit those `after`."""
    if key not in section.options(after):
        return section.any_accepts(key)
    if isinstance(value, Mapping):
        return False  # a table with a name of its own, such as algorithm.optimizer
    # A value that the old plug-in rejected too is a mistake, which validation reports.
    return section.accepts(before, key, value) and not section.accepts(after, key, value)


_NAME_KEYS = {table.names_at: table.choices[0].key for table in PLUGIN_TABLES}


def as_table(path: Sequence[str], value: Any) -> Any:
    """Returns the value at a path of the config, where a name stands for the table of a plug-in.

    Only the whole path says what a text is: `average = "ema"` is a table, but the option of the
    same name in `[algorithm]` is a text.

    >>> as_table(["algorithm"], "fedprox"), as_table(["data"], "mnist")
    ({'name': 'fedprox'}, {'source': 'mnist'})
    >>> as_table(["algorithm", "average"], "all")
    'all'
    """
    key = _NAME_KEYS.get(tuple(path))
    return {key: value} if key is not None and isinstance(value, str) else value


def _table(values: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any]:
    """Returns the table at a path, or an empty one."""
    inner: Any = values
    for depth, name in enumerate(path, 1):
        inner = as_table(path[:depth], inner.get(name)) if isinstance(inner, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _replace_table(
    values: Mapping[str, Any], path: Sequence[str], table: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns `values` with another table at a path."""
    if not path:
        return dict(table)
    return {**values, path[0]: _replace_table(values[path[0]], path[1:], table)}


def build_optimizer(table: Mapping[str, Any]) -> Optimizer:
    """Returns the local optimizer of `[algorithm.optimizer]`."""
    return optimizers[table["name"]](**_options(table))


def build_algorithm(table: Mapping[str, Any]) -> Algorithm:
    """Returns the algorithm of `[algorithm]` with its hyper-parameters."""
    return algorithms[table["name"]](
        **{**_options(table), "optimizer": build_optimizer(table["optimizer"])}
    )


def build_participation(table: Mapping[str, Any] | None) -> Participation:
    """Returns the participation model of `[participation]`; without it, all clients reply."""
    return Everybody() if table is None else participations[table["name"]](**_options(table))


def build_aggregator(table: Mapping[str, Any] | None) -> Aggregator:
    """Returns the aggregator of `[aggregator]`; without the table, the mean."""
    return MEAN if table is None else aggregators[table["name"]](**_options(table))


def build_attack(table: Mapping[str, Any] | None) -> Attack | None:
    """Returns the simulated attack of `[attack]`; without the table, None."""
    return None if table is None else attacks[table["name"]](**_options(table))


def build_average(table: Mapping[str, Any] | None) -> Average:
    """Returns the average of `[average]`; without the table, the current modes predict."""
    return NO_AVERAGE if table is None else averages[table["name"]](**_options(table))


def _options(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a table other than `name`."""
    return {key: value for key, value in table.items() if key != "name"}
