"""Tables whose options depend on a name: which there are, what they take, and what is made of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from ..core.aggregator import MEAN, Aggregator, aggregators
from ..core.algorithm import Algorithm, algorithms
from ..core.attack import Attack, attacks
from ..core.engine import engines
from ..core.optimizer import Optimizer, optimizers
from ..core.participation import Everybody, Participation, participations
from ..data import partitions, sources
from ..models import models
from ..registry import Registry
from .plugin_tables import Parameter, Table, field_parameters, schema

GIVEN_TO_MODELS = ("shape", "outputs")  # known from the data
GIVEN_TO_PARTITIONS = ("source", "clients", "seed")
GIVEN_TO_ENGINES = ("learner", "data", "work", "seed")


class Choice(NamedTuple):
    """A key that names a plug-in."""

    key: str
    registry: Registry[Any]
    default: str
    given: tuple[str, ...] = ()  # what the plug-in takes and is no option

    def options(self, name: str) -> dict[str, Parameter]:
        """What the plug-in of this name takes."""
        taken = field_parameters(self.registry[name])
        return {key: value for key, value in taken.items() if key not in self.given}


class Section(NamedTuple):
    """A table with the options of what is chosen in `names_at`; `common` ones it takes whatever is
    chosen.
    """

    path: tuple[str, ...]
    choices: tuple[Choice, ...]
    names_at: tuple[str, ...]
    common: dict[str, Parameter]

    def options(self, names: Sequence[str]) -> dict[str, Parameter]:
        """The keys of the table with these names."""
        known = {choice.key: (str, ...) for choice in self.choices} | self.common
        for choice, name in zip(self.choices, names, strict=True):
            known |= choice.options(name)
        return known | self.common

    def schema(self, names: Sequence[str]) -> type[Table]:
        """The table with these names."""
        return schema(self.path[-1], self.options(names))

    def knows(self, names: Sequence[Any]) -> bool:
        """Whether there is something of each name."""
        return all(
            isinstance(n, str) and n in c.registry for c, n in zip(self.choices, names, strict=True)
        )

    def fits(self, names: Sequence[Any], key: str, value: Any) -> bool:
        """Whether the table with these names takes this option with this value."""
        taken = self.options(names) if self.knows(names) else {}
        try:
            return key in taken and bool(
                schema(key, {key: taken[key]}).model_validate({key: value})
            )
        except ValidationError:
            return False

    def has(self, key: str) -> bool:
        """Whether any plug-in takes this option."""
        return any(
            key in choice.options(name) for choice in self.choices for name in choice.registry
        )


_DATA: dict[str, Parameter] = {
    "clients": (PositiveInt | None, None),
    "seed": (NonNegativeInt | None, None),
    "validation": (float | None, None),
    "test_examples": (PositiveInt | None, None),
    "server_share": (float | None, None),
    "server_file": (Path | None, None),
}
_SOURCE, _PARTITION = (
    Choice("source", sources, "digits"),
    Choice("partition", partitions, "iid", GIVEN_TO_PARTITIONS),
)
DATA = Section(("data",), (_SOURCE, _PARTITION), ("data",), _DATA)
MODEL = Section(("model",), (Choice("name", models, "mlp", GIVEN_TO_MODELS),), ("model",), {})
ALGORITHM = Section(("algorithm",), (Choice("name", algorithms, "fedavg"),), ("algorithm",), {})
OPTIMIZER = Section(
    ("algorithm", "optimizer"), (Choice("name", optimizers, "sgd"),), ("algorithm", "optimizer"), {}
)
PARTICIPATION = Section(
    ("participation",), (Choice("name", participations, "devices"),), ("participation",), {}
)
AGGREGATOR = Section(("aggregator",), (Choice("name", aggregators, "median"),), ("aggregator",), {})
ATTACK = Section(("attack",), (Choice("name", attacks, "sign-flip"),), ("attack",), {})
ENGINE = Section(
    ("engine", "options"), (Choice("name", engines, "vector", GIVEN_TO_ENGINES),), ("engine",), {}
)
SECTIONS = (DATA, MODEL, ALGORITHM, OPTIMIZER, PARTICIPATION, AGGREGATOR, ATTACK, ENGINE)


def without_leftovers(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`under` without the options that belonged to a name which `over` replaces and that the new
    one does not take.

    Nor does one stay that the new one takes as something else: `hidden` is a list for "mlp", a
    number for "lstm". An option nobody takes stays, so that a slip of the pen is not swallowed.
    """
    kept = dict(under)
    for section in SECTIONS:
        here, there = _table(kept, section.names_at), _table(over, section.names_at)
        before = [here.get(choice.key, choice.default) for choice in section.choices]
        after = [
            there.get(choice.key, name)
            for choice, name in zip(section.choices, before, strict=True)
        ]
        options = _table(kept, section.path)
        if before != after and options and section.knows(after):
            left = {
                key: value
                for key, value in options.items()
                if _stays(section, key, value, before, after)
            }
            kept = _with_table(kept, section.path, left)
    return kept


def _stays(
    section: Section, key: str, value: Any, before: Sequence[Any], after: Sequence[Any]
) -> bool:
    """Whether an option outlives the names it was given with."""
    if key not in section.options(after):
        return not section.has(key)
    if isinstance(value, Mapping):
        return True  # a table of its own
    return section.fits(after, key, value) or not section.fits(before, key, value)


def as_table(key: str, value: Any) -> Any:
    """A value; an optimizer's name alone as the table it stands for."""
    return {"name": value} if key == "optimizer" and isinstance(value, str) else value


def _table(values: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any]:
    """The table at a path, empty where there is none."""
    inner: Any = values
    for name in path:
        inner = as_table(name, inner.get(name)) if isinstance(inner, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _with_table(
    values: Mapping[str, Any], path: Sequence[str], table: Mapping[str, Any]
) -> dict[str, Any]:
    if not path:
        return dict(table)
    return {**values, path[0]: _with_table(values[path[0]], path[1:], table)}


def build_optimizer(table: Mapping[str, Any]) -> Optimizer:
    """The local optimiser of `[algorithm.optimizer]`."""
    return optimizers[table["name"]](**_options(table))


def build_algorithm(table: Mapping[str, Any]) -> Algorithm:
    """The method with its hyper-parameters."""
    return algorithms[table["name"]](
        **{**_options(table), "optimizer": build_optimizer(table["optimizer"])}
    )


def build_participation(table: Mapping[str, Any] | None) -> Participation:
    """Who answers; everybody without a table."""
    return Everybody() if table is None else participations[table["name"]](**_options(table))


def build_aggregator(table: Mapping[str, Any] | None) -> Aggregator:
    """How uploads are combined; by their mean without a table."""
    return MEAN if table is None else aggregators[table["name"]](**_options(table))


def build_attack(table: Mapping[str, Any] | None) -> Attack | None:
    """The simulated attack; none without a table."""
    return None if table is None else attacks[table["name"]](**_options(table))


def _options(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "name"}
