"""The config of a run. Validation reports all problems in one message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)

from ..core.schedule import schedules
from ..data.sources.user_file import USER_FILES
from ..errors import InputError, config_keys
from ..federation.resolve import resolve_schedule
from ..personal.settings import PersonalSettings
from ..predict import MAX_DROPOUT_SAMPLES
from ..prediction import Combine
from ..tracking.backends import trackers
from ..uncertainty.calibration_settings import CalibrationSettings, Place, Scope
from ..uncertainty.conformal_scores import Method
from ..uncertainty.scores import Score
from .hints import suggest_keys
from .limits import check_values
from .messages import LONGEST_NAME, NAME, sentence
from .plugin_tables import Table
from .plugins import as_table
from .python_parts import describe_parts, python_parts
from .validate_plugins import (
    check_aggregator,
    check_algorithm,
    check_attack,
    check_average,
    check_compatible,
    check_data,
    check_engine,
    check_model,
    check_participation,
    check_registered,
    check_shared,
    try_build,
)

NOT_HASHED = ("name", "track", "report")  # settings that do not change results


class EnsembleTable(Table):
    """The number of modes, and the schedule of which clients train which mode."""

    modes: PositiveInt = Field(default=5, description="K")
    strata: PositiveInt | None = Field(
        default=None, description="Q; by default one stratum per client of a round"
    )
    clients_per_round: PositiveInt = Field(default=10, description="M")
    schedule: str = "balanced"
    # None, not an empty list: settings that are None are not hashed, so that runs of versions
    # without this setting keep their hash.
    shared: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, description="patterns of the names of parameters that all modes share"
    )
    personal: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, description="patterns of the names of parameters that clients keep"
    )
    alternate: bool | None = Field(
        default=None, description="visits train personal parameters first, then the others"
    )
    combine: Combine | None = None
    # None, not 0, for the same reason.
    dropout_samples: int | None = Field(
        default=None,
        ge=1,
        le=MAX_DROPOUT_SAMPLES,
        description="MC-dropout: predictions of each model with dropout active; none by default",
    )

    @field_validator("shared", "personal", mode="after")
    @classmethod
    def _empty_is_unset(cls, value: list[str] | None) -> list[str] | None:
        return value or None


class PersonalizeTable(Table):
    """Personal models that are made and tested after the last round."""

    methods: list[Literal["select", "mix", "posterior", "tune", "head"]] = Field(
        min_length=1, description="how clients use the modes"
    )
    steps: PositiveInt = Field(default=20, description="local steps of tune and head")
    lr: PositiveFloat | None = Field(
        default=None, description="of these steps; by default that of the last round"
    )
    optimizer: dict[str, Any] = Field(default_factory=lambda: {"name": "sgd"})
    batch_size: PositiveInt | None = None
    head: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, description="patterns of the names of the parameters that head trains"
    )
    prior: NonNegativeFloat = Field(
        default=1.0, description="imagined rows for equal weights, of mix"
    )

    def settings(self) -> list[PersonalSettings]:
        """Returns the settings of each method."""
        values = self.model_dump(exclude={"methods", "head"})
        return [
            PersonalSettings(method=name, head=self.head if name == "head" else None, **values)
            for name in self.methods
        ]


class TrainingTable(Table):
    """Local training of a client."""

    epochs: PositiveInt = 1
    steps: PositiveInt | None = None
    batch_size: PositiveInt = 32
    last_batch: Literal["keep", "wrap", "drop"] | None = None
    loss: Literal["cross_entropy", "bce", "mse"] = "cross_entropy"


class EvaluationTable(Table):
    """Evaluation on the test set."""

    every: PositiveInt = Field(
        default=10, description="rounds between evaluations; the last round always has one"
    )
    dropout: bool = Field(
        default=False, description="also test in train mode, as the authors' code did"
    )
    batch_size: PositiveInt = 1024
    # None, not an empty table: settings that are None are not hashed.
    ood: dict[str, dict[str, Any]] | None = Field(
        default=None,
        description="data out of distribution by a name for them: source, and its options",
    )


class ReportTable(Table):
    """What the files and the report of a run publish about the data; changes no result."""

    publish_clients: bool = Field(
        default=True, description="names, sizes and label counts of individual clients"
    )
    publish_targets: bool = Field(
        default=True, description="for regression, individual targets of the test set"
    )
    publish_inputs: bool | None = Field(
        default=None,
        description="pictures of the most uncertain test images; by default those of public data",
    )


class CalibrationTable(Table):
    """Calibration after the last round, by the rows of `data.calibration`."""

    alpha: float = Field(
        default=0.1, description="share of targets that may be outside of sets or intervals"
    )
    method: Literal["auto", "none"] | Method = "auto"
    temperature: Literal["auto", "none"] | Place = "auto"
    scope: Scope = Field(default="mixture", description="which rows keep alpha")
    randomized: bool = True
    penalty: float = 0.01
    free_classes: int = 1
    abstain: tuple[Score, ...] = Field(
        default=("entropy",), description="scores to leave rows unanswered by"
    )

    def settings(self) -> CalibrationSettings:
        """Returns the settings; raises InputError if a value is not possible."""
        return CalibrationSettings(**self.model_dump())


class EngineTable(Table):
    """The engine that executes the run."""

    name: str = "vector"
    device: str = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    options: dict[str, Any] = Field(default_factory=dict)


class Config(Table):
    """All settings of a run.

    The tables of plug-ins (data, model, algorithm, ...) are dicts with defaults filled in.
    """

    name: str = Field(default="run", pattern=NAME, max_length=LONGEST_NAME)
    seed: NonNegativeInt = 0
    rounds: PositiveInt = 100
    track: list[str] = Field(default_factory=list, description="trackers that log the run")
    data: dict[str, Any] = Field(default_factory=lambda: {"source": "digits"})
    model: dict[str, Any] = Field(default_factory=lambda: {"name": "mlp"})
    algorithm: dict[str, Any] = Field(default_factory=lambda: {"name": "fedavg"})
    ensemble: EnsembleTable = EnsembleTable()
    participation: dict[str, Any] | None = None  # None: all clients reply
    aggregator: dict[str, Any] | None = None  # None: the weighted mean
    attack: dict[str, Any] | None = None  # None: all clients are honest
    average: dict[str, Any] | None = None  # None: the current modes predict
    calibration: CalibrationTable | None = None  # None: nothing is calibrated
    training: TrainingTable = TrainingTable()
    personalize: PersonalizeTable | None = None  # None: no personal models are made
    evaluation: EvaluationTable = EvaluationTable()
    report: ReportTable = ReportTable()
    engine: EngineTable = EngineTable()

    def values(self) -> dict[str, Any]:
        """Returns all settings that are not None, as values of TOML and JSON."""
        return plain(self.model_dump())  # type: ignore[no-any-return]

    def toml(self, empty: bool = True) -> str:
        """Returns the config as TOML text; `empty=False` leaves out an empty `engine.options`."""
        values = self.values()
        if not empty and not values["engine"]["options"]:
            del values["engine"]["options"]
        return tomli_w.dumps(values)

    def last_test(self, round: int) -> int:
        """Returns the latest round up to `round` that has an evaluation, or 0 if there is none."""
        return round if round == self.rounds else round - round % self.evaluation.every

    def hash(self) -> str:
        """Returns 12 hexadecimal digits that depend on all settings except `NOT_HASHED`."""
        values = {key: value for key, value in self.values().items() if key not in NOT_HASHED}
        return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def resolve(values: Mapping[str, Any], where: str = "config") -> Config:
    """Returns the validated config with all defaults filled in.

    Args:
        where: the name of the config in error messages.

    Raises:
        InputError: the config has problems; the message lists all of them.
    """
    if {"row", "base"} <= values.keys():
        raise InputError(f"{where} is a comparison file: use 'fedensemble compare' with it.")
    if python_parts(values):
        raise InputError(describe_parts(values, where))
    with config_keys():
        config, problems = check(values)
    if config is None:
        raise InputError(f"{where} has {join_problems(problems)}")
    return config


def join_problems(problems: Sequence[str]) -> str:
    """Returns the number of problems and a list of them, one per line."""
    return f"{len(problems)} problem{'s' * (len(problems) > 1)}:" + "".join(
        f"\n  - {problem}" for problem in problems
    )


def check(values: Mapping[str, Any]) -> tuple[Config | None, list[str]]:
    """Returns the config with all defaults (None if invalid), and the problems that were found.

    Problems that show only with the data are not found.
    """
    problems: list[str] = []
    check_values(values, "config")
    filled = {key: as_table((key,), value) for key, value in values.items()}
    for name, check_table in (
        ("data", check_data),
        ("model", check_model),
        ("algorithm", check_algorithm),
        ("participation", check_participation),
        ("aggregator", check_aggregator),
        ("attack", check_attack),
        ("average", check_average),
    ):
        default = Config.model_fields[name].get_default(call_default_factory=True)
        table = filled.get(name, default)
        if isinstance(table, Mapping):
            filled[name] = check_table(dict(table), problems)
    check_compatible(
        filled.get("algorithm"), filled.get("aggregator"), filled.get("average"), problems
    )
    check_engine(filled.get("engine"), problems)
    _check_schedule(filled, problems)
    _check_calibration(filled, problems)
    tracker_names = filled.get("track")
    for name in tracker_names if isinstance(tracker_names, list) else ():
        check_registered("track", name, trackers, problems)
    try:
        config = Config.model_validate(filled)
    except ValidationError as error:
        return None, problems + [
            sentence(item, Config, suggest=suggest_keys) for item in error.errors()
        ]
    _check_personalize(config, problems)
    return (None if problems else config), problems


def _check_personalize(config: Config, problems: list[str]) -> None:
    """Checks the settings of personal models, and that there are rows to choose by."""
    if config.personalize is None:
        return
    try_build("personalize", config.personalize.settings, problems)
    if not config.data.get("calibration") and config.data.get("source") not in USER_FILES:
        problems.append(
            "personalize: the clients have no validation rows; set data.calibration, such as 0.1."
        )


def _check_calibration(filled: Mapping[str, Any], problems: list[str]) -> None:
    """Checks `[calibration]`: its values, and that there are rows to calibrate by."""
    table = filled.get("calibration")
    if table is None:
        return
    try:
        made = CalibrationTable.model_validate(table)
    except ValidationError:
        return  # validation of the whole config reports it
    try_build("calibration", made.settings, problems)
    data = filled.get("data")
    # The user's own files may have such rows.
    if (
        isinstance(data, Mapping)
        and data.get("calibration") is None
        and data.get("source") not in USER_FILES
    ):
        problems.append(
            "calibration: there are no rows to calibrate by: set data.calibration to the share of "
            "rows that each client holds back, such as 0.1"
        )


def _check_schedule(filled: Mapping[str, Any], problems: list[str]) -> None:
    """Checks `[ensemble]` as far as possible before the number of clients is known."""
    table = filled.get("ensemble", {})
    settings = table if isinstance(table, Mapping) else {}
    name = settings.get("schedule", EnsembleTable().schedule)
    if not check_registered("ensemble.schedule", name, schedules, problems):
        return
    known = {key: settings[key] for key in EnsembleTable.model_fields if key in settings}
    try:
        sizes = EnsembleTable.model_validate(known)
    except ValidationError:
        return  # validation of the whole config reports it
    modes, strata, per_round = sizes.modes, sizes.strata, sizes.clients_per_round
    # The number of clients is not known yet. With this number no schedule has too few clients.
    enough = max(per_round, strata or 1)
    known_problems = len(problems)
    try_build(
        "ensemble",
        lambda: resolve_schedule(name, modes, strata, per_round, enough).check(enough),
        problems,
    )
    if sizes.shared and modes > 1 and len(problems) == known_problems:
        schedule = resolve_schedule(name, modes, strata, per_round, enough)
        check_shared(filled.get("algorithm"), schedule, problems)


def plain(value: Any) -> Any:
    """Returns a value of TOML and JSON: without None, tuples as lists, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value if isinstance(value, (str, int, float, bool)) else str(value)
