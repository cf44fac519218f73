"""The config of a run: every setting, validated at once, with all problems in one message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from ..core.algorithm import algorithms
from ..core.engine import engines
from ..core.optimizer import optimizers
from ..core.participation import participations
from ..core.schedule import schedules
from ..data import partitions, sources
from ..errors import InputError, unknown
from ..models import models
from ..predict import Combine
from ..registry import Registry
from .sections import Parameter, Table, algorithm_schema, parameters, participation_schema, schema
from .trackers import trackers

GIVEN_TO_MODELS = ("shape", "outputs")  # known from the data
NOT_HASHED = ("name", "track")  # they change no result
GIVEN_TO_PARTITIONS = ("source", "clients", "seed")


class EnsembleTable(Table):
    """How many models, and who trains which."""

    modes: PositiveInt = Field(default=5, description="K")
    strata: PositiveInt | None = Field(default=None, description="Q; left out, a stratum for each client of a round")
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

    every: PositiveInt = Field(default=10, description="rounds between evaluations; the last round always has one")
    dropout: bool = Field(default=False, description="test with dropout active too, as the authors' code did")
    batch_size: PositiveInt = 1024


class EngineTable(Table):
    """What carries the run out."""

    name: str = "vector"
    device: str = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    options: dict[str, Any] = Field(default_factory=dict)


class Config(Table):
    """A whole run. Tables of plug-ins (data, model, algorithm) are plain dicts, resolved and checked."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: NonNegativeInt = 0
    rounds: PositiveInt = 100
    track: list[str] = Field(default_factory=list, description="programs that follow the run")
    data: dict[str, Any] = Field(default_factory=lambda: {"source": "digits"})
    model: dict[str, Any] = Field(default_factory=lambda: {"name": "mlp"})
    algorithm: dict[str, Any] = Field(default_factory=lambda: {"name": "fedavg"})
    ensemble: EnsembleTable = EnsembleTable()
    participation: dict[str, Any] | None = None  # left out, everybody answers
    training: TrainingTable = TrainingTable()
    evaluation: EvaluationTable = EvaluationTable()
    engine: EngineTable = EngineTable()

    def values(self) -> dict[str, Any]:
        """All settings as plain values, those that are None left out."""
        return _plain(self.model_dump())  # type: ignore[no-any-return]

    def toml(self) -> str:
        """The resolved config as a TOML file."""
        return tomli_w.dumps(self.values())

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
    problems: list[str] = []
    filled = dict(values)
    for name, table in (("data", _data_table), ("model", _model_table), ("algorithm", _algorithm_table),
                        ("participation", _participation_table)):  # fmt: skip
        given = filled.get(name, Config.model_fields[name].get_default(call_default_factory=True))
        if isinstance(given, Mapping):
            filled[name] = _check(name, dict(given), table, problems)
    config: Config | None = None
    try:
        config = Config.model_validate(filled)
    except ValidationError as error:
        problems += [_sentence(item, Config) for item in error.errors()]
    if config is not None:
        for kind, known, chosen in (
            ("ensemble.schedule", schedules, config.ensemble.schedule),
            ("engine.name", engines, config.engine.name),
        ):
            _named(kind, chosen, known, problems)
        for name in config.track:
            _named("track", name, trackers, problems)
    if problems or config is None:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise InputError(f"{where} has {len(problems)} problem{'s' * (len(problems) > 1)}:{listed}")
    return config


def _check(name: str, given: dict[str, Any], table: Any, problems: list[str]) -> dict[str, Any]:
    """A plug-in's table with its defaults; what is wrong with it goes to `problems`."""
    made = table(given, problems)
    if made is None:
        return given
    try:
        return made.model_validate(given).model_dump()  # type: ignore[no-any-return]
    except ValidationError as error:
        problems += [_sentence(item, made, name) for item in error.errors()]
        return given


def _data_table(given: dict[str, Any], problems: list[str]) -> type[Table] | None:
    given.setdefault("source", "digits")
    given.setdefault("partition", "iid")
    if not _named("data.source", given["source"], sources, problems):
        return None
    if not _named("data.partition", given["partition"], partitions, problems):
        return None
    known: dict[str, Parameter] = parameters(sources[given["source"]])
    known |= parameters(partitions[given["partition"]], GIVEN_TO_PARTITIONS)
    known |= {"source": (str, ...), "partition": (str, ...), "clients": (PositiveInt | None, None)}
    known |= {"server_share": (float | None, None), "server_file": (Path | None, None)}
    known |= {"validation": (float | None, None), "test_examples": (PositiveInt | None, None)}
    return schema("data", known | {"seed": (NonNegativeInt | None, None)})


def _model_table(given: dict[str, Any], problems: list[str]) -> type[Table] | None:
    given.setdefault("name", "mlp")
    if not _named("model.name", given["name"], models, problems):
        return None
    return schema("model", {**parameters(models[given["name"]], GIVEN_TO_MODELS), "name": (str, ...)})


def _algorithm_table(given: dict[str, Any], problems: list[str]) -> type[Table] | None:
    given.setdefault("name", "fedavg")
    inner = given.get("optimizer", "sgd")
    given["optimizer"] = {"name": inner} if isinstance(inner, str) else {"name": "sgd", **inner}
    if not _named("algorithm.name", given["name"], algorithms, problems):
        return None
    if not _named("algorithm.optimizer.name", given["optimizer"]["name"], optimizers, problems):
        return None
    return algorithm_schema(algorithms[given["name"]], optimizers[given["optimizer"]["name"]])


def _participation_table(given: dict[str, Any], problems: list[str]) -> type[Table] | None:
    given.setdefault("name", "devices")
    if not _named("participation.name", given["name"], participations, problems):
        return None
    return participation_schema(participations[given["name"]])


def _named(key: str, name: Any, known: Registry[Any], problems: list[str]) -> bool:
    if isinstance(name, str) and name in known:
        return True
    problems.append(f"{key}: {unknown(known.kind, str(name), known)}")
    return False


def _sentence(error: Any, table: type[Table], prefix: str = "") -> str:
    """One problem found by pydantic, in our words."""
    place = [str(part) for part in error["loc"]]
    key = ".".join([prefix, *place] if prefix else place)
    if error["type"] == "extra_forbidden":
        holder: Any = table
        for part in place[:-1]:
            field = holder.model_fields.get(part)
            holder = field.annotation if field is not None else Table
        return f"{key}: {unknown('key', place[-1], holder.model_fields)}"
    if error["type"] == "missing":
        return f"{key}: is missing, and has no default."
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{key}: {message}; got {error['input']!r}."


def _plain(value: Any) -> Any:
    """Values that TOML and JSON know: no None, tuples as lists, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool)) else str(value)
