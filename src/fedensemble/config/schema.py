"""The config of a run: every setting, validated at once, with all problems in one message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal

import tomli_w
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from ..core.schedule import schedules
from ..errors import InputError
from ..federation.resolve import resolve_schedule
from ..predict import Combine
from ..tracking.backends import trackers
from .limits import check_values
from .messages import LONGEST_NAME, NAME, sentence
from .plugin_tables import Table
from .validate import (
    check_aggregator,
    check_algorithm,
    check_attack,
    check_data,
    check_engine,
    check_fit,
    check_model,
    check_participation,
    named,
    tried,
)

NOT_HASHED = ("name", "track", "report")  # they change no result


class EnsembleTable(Table):
    """How many models, and who trains which."""

    modes: PositiveInt = Field(default=5, description="K")
    strata: PositiveInt | None = Field(
        default=None, description="Q; left out, a stratum for each client of a round"
    )
    clients_per_round: PositiveInt = Field(default=10, description="M")
    schedule: str = "stratified"
    combine: Combine | None = None


class TrainingTable(Table):
    """What a client does in a round."""

    epochs: PositiveInt = 1
    steps: PositiveInt | None = None
    batch_size: PositiveInt = 32
    last_batch: Literal["keep", "wrap", "drop"] | None = None
    loss: Literal["cross_entropy", "mse"] = "cross_entropy"


class EvaluationTable(Table):
    """When and how the test set is used."""

    every: PositiveInt = Field(
        default=10, description="rounds between evaluations; the last round always has one"
    )
    dropout: bool = Field(
        default=False, description="test in train mode too, as the authors' code did"
    )
    batch_size: PositiveInt = 1024


class ReportTable(Table):
    """What the run's files and its report tell of people's data; changes no result."""

    publish_clients: bool = Field(
        default=True, description="names, sizes and label counts of single clients"
    )
    publish_targets: bool = Field(
        default=True, description="for regression, single targets of the test set"
    )


class EngineTable(Table):
    """What carries the run out."""

    name: str = "vector"
    device: str = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    options: dict[str, Any] = Field(default_factory=dict)


class Config(Table):
    """A whole run. Tables of plug-ins (data, model, algorithm) are plain dicts, resolved and
    checked.
    """

    name: str = Field(default="run", pattern=NAME, max_length=LONGEST_NAME)
    seed: NonNegativeInt = 0
    rounds: PositiveInt = 100
    track: list[str] = Field(default_factory=list, description="programs that follow the run")
    data: dict[str, Any] = Field(default_factory=lambda: {"source": "digits"})
    model: dict[str, Any] = Field(default_factory=lambda: {"name": "mlp"})
    algorithm: dict[str, Any] = Field(default_factory=lambda: {"name": "fedavg"})
    ensemble: EnsembleTable = EnsembleTable()
    participation: dict[str, Any] | None = None  # left out, everybody answers
    aggregator: dict[str, Any] | None = None  # left out, the weighted mean
    attack: dict[str, Any] | None = None  # left out, all clients are honest
    training: TrainingTable = TrainingTable()
    evaluation: EvaluationTable = EvaluationTable()
    report: ReportTable = ReportTable()
    engine: EngineTable = EngineTable()

    def values(self) -> dict[str, Any]:
        """All settings as plain values, those that are None left out."""
        return _plain(self.model_dump())  # type: ignore[no-any-return]

    def toml(self, empty: bool = True) -> str:
        """The resolved config as a TOML file, with its empty tables or without them."""
        values = self.values()
        if not empty and not values["engine"]["options"]:
            del values["engine"]["options"]
        return tomli_w.dumps(values)

    def last_test(self, round: int) -> int:
        """The latest round, this one or one before, after which there is a test; 0 before the
        first.
        """
        return round if round == self.rounds else round - round % self.evaluation.every

    def hash(self) -> str:
        """Twelve letters that tell two configs apart; what changes no result does not count."""
        values = {key: value for key, value in self.values().items() if key not in NOT_HASHED}
        return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def resolve(values: Mapping[str, Any], where: str = "config") -> Config:
    """The checked config with every default filled in.

    Raises:
        InputError: naming all problems at once.
    """
    if {"row", "base"} <= values.keys():
        raise InputError(f"{where} is a comparison file: use 'fedensemble compare' with it.")
    config, problems = check(values)
    if config is None:
        raise InputError(f"{where} has {listed(problems)}")
    return config


def listed(problems: Sequence[str]) -> str:
    """The words for some problems, one a line."""
    return f"{len(problems)} problem{'s' * (len(problems) > 1)}:" + "".join(
        f"\n  - {each}" for each in problems
    )


def check(values: Mapping[str, Any]) -> tuple[Config | None, list[str]]:
    """The config with every default filled in, or None and all that is wrong with it, as far as no
    data are needed.
    """
    problems: list[str] = []
    check_values(values, "config")
    filled = dict(values)
    for name, checked in (
        ("data", check_data),
        ("model", check_model),
        ("algorithm", check_algorithm),
        ("participation", check_participation),
        ("aggregator", check_aggregator),
        ("attack", check_attack),
    ):
        given = filled.get(name, Config.model_fields[name].get_default(call_default_factory=True))
        if isinstance(given, Mapping):
            filled[name] = checked(dict(given), problems)
    check_fit(filled.get("algorithm"), filled.get("aggregator"), problems)
    check_engine(filled.get("engine"), problems)
    _schedule(filled, problems)
    tracked = filled.get("track")
    for name in tracked if isinstance(tracked, list) else ():
        named("track", name, trackers, problems)
    try:
        config = Config.model_validate(filled)
    except ValidationError as error:
        return None, problems + [sentence(item, Config) for item in error.errors()]
    return (None if problems else config), problems


def _schedule(filled: Mapping[str, Any], problems: list[str]) -> None:
    """What can be said of the ensemble before the number of clients is known."""
    table = filled.get("ensemble", {})
    given = table if isinstance(table, Mapping) else {}
    name = given.get("schedule", EnsembleTable().schedule)
    if not named("ensemble.schedule", name, schedules, problems):
        return
    known = {key: given[key] for key in EnsembleTable.model_fields if key in given}
    try:
        sizes = EnsembleTable.model_validate(known)
    except ValidationError:
        return  # said with the rest of the config
    modes, strata, per_round = sizes.modes, sizes.strata, sizes.clients_per_round
    enough = max(per_round, strata or 1)
    tried(
        "ensemble",
        lambda: resolve_schedule(name, modes, strata, per_round, enough).check(enough),
        problems,
    )


def _plain(value: Any) -> Any:
    """Values that TOML and JSON know: no None, tuples as lists, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool)) else str(value)
