"""Comparisons: rows of settings trained on the same data, with one run per row and seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, NonNegativeInt, ValidationError

from ...config.build import resolve_device
from ...config.messages import LONGEST_NAME, NAME, sentence
from ...config.plugin_tables import Table
from ...config.schema import Config, check, join_problems
from ...config.sweep import cross, split_sweeps
from ...config.toml import Values, merge, merge_tables, parse_setting, read_toml, with_settings
from ...errors import DivergedError, InputError, unknown
from ...metrics import CLASSIFICATION, REGRESSION
from ..run import RunCallbacks
from ..storage.run_folder import RunFolder
from .data_cache import DataCache
from .multi_run import Task, run_all


class RowTable(Table):
    """A [[row]] of a comparison file: a label and the settings it overrides."""

    label: str
    set: dict[str, Any] = Field(default_factory=dict)


class ComparisonTable(Table):
    """The content of a comparison file."""

    name: str = Field(default="compare", pattern=NAME, max_length=LONGEST_NAME)
    base: str
    seeds: list[NonNegativeInt] = Field(default=[0, 1, 2], min_length=1)
    metric: str = "accuracy"
    row: list[RowTable] = Field(min_length=1)
    column: list[RowTable] = Field(
        default_factory=list, description="settings that every row is combined with"
    )


@dataclass(frozen=True)
class Row:
    """A row of a comparison: one config per seed."""

    label: str
    configs: tuple[Config, ...]


@dataclass(frozen=True)
class Comparison:
    """A comparison that is ready to run."""

    name: str
    metric: str
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]

    def folder(self, root: Path) -> Path:
        """Returns the folder for its report; the name contains a hash of all configs."""
        hashes = json.dumps(
            [[row.label, *(config.hash() for config in row.configs)] for row in self.rows]
        )
        return root / self.name / f"compare-{sha256(hashes.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class RowResult:
    """The runs of a row. If one of them has diverged, only `failed` is set.

    Attributes:
        label: of the row.
        folders: one per seed.
        summaries: one per seed.
        curves: the records of all rounds, one list per seed.
        failed: error messages of diverged runs, by seed.
    """

    label: str
    folders: tuple[Path, ...]
    summaries: tuple[Mapping[str, Any], ...]
    curves: tuple[list[dict[str, Any]], ...] = field(default=())
    failed: Mapping[int, str] = field(default_factory=dict)

    def values(self, metric: str, way: str = "test") -> list[float]:
        """Returns a metric after the last round, one value per seed; empty without such a test."""
        return [s[way][metric] for s in self.summaries if metric in s.get(way, {})]


def read_comparison(
    path: Path, settings: Sequence[str] = (), seeds: Sequence[int] | None = None
) -> Comparison:
    """Reads a comparison file; the path of its base config is relative to the file.

    Every row is combined with every column and with all swept values of `settings`.
    """
    single, sweeps = split_sweeps(settings)
    values = read_toml(path)
    try:
        table = ComparisonTable.model_validate(values)
    except ValidationError as error:
        raise InputError(
            f"{path} is not a valid comparison file: {format_problems(error, ComparisonTable)}"
        ) from None
    base = with_settings(read_toml(path.parent / table.base), single)
    seeds = seeds or table.seeds
    rows, columns = (
        [(each.label, changes_of(each.set)) for each in tables]
        for tables in (table.row, table.column)
    )
    combinations = cross([rows, columns] if columns else [rows], sweeps, len(seeds))
    return make_comparison(table.name, base, combinations, seeds, table.metric)


def make_comparison(
    name: str,
    base: Mapping[str, Any],
    rows: Sequence[tuple[str, Values]],
    seeds: Sequence[int],
    metric: str,
) -> Comparison:
    """Returns a comparison with one row per (label, changes), each changing `base`.

    Raises an InputError that lists the problems of all rows.
    """
    if len(set(seeds)) < len(seeds):
        raise InputError(f"Seeds must be distinct; got {', '.join(map(str, seeds))}.")
    if len({label for label, _ in rows}) < len(rows):
        raise InputError(
            f"Labels of rows must be distinct; got {', '.join(label for label, _ in rows)}."
        )
    # Rows often share a mistake in the base config: it is reported once, for all of these rows.
    labels_by_problems: dict[tuple[str, ...], list[str]] = {}
    resolved_rows = []
    for label, changes in rows:
        values = merge(base, changes)
        checked = [check({**values, "seed": seed}) for seed in seeds]
        problems = tuple(dict.fromkeys(problem for _, each in checked for problem in each))
        if problems:
            labels_by_problems.setdefault(problems, []).append(label)
        configs = (resolve_device(config) for config, _ in checked if config is not None)
        resolved_rows.append(Row(label, tuple(configs)))
    if labels_by_problems:
        raise InputError(
            "\n".join(
                _subject(labels) + join_problems(problems)
                for problems, labels in labels_by_problems.items()
            )
        )
    return Comparison(name, metric, tuple(resolved_rows), tuple(seeds))


def _subject(labels: Sequence[str]) -> str:
    """Returns the beginning of a sentence about rows, e.g. "rows 'a', 'b' have "."""
    several = len(labels) > 1
    quoted = ", ".join(f"'{label}'" for label in labels)
    return f"row{'s' * several} {quoted} {'have' if several else 'has'} "


def compare(
    comparison: Comparison,
    root: Path,
    make_callbacks: Callable[[str, int], RunCallbacks],
    finished: Callable[[], None],
) -> list[RowResult]:
    """Trains all runs that are not finished yet, and returns the results of all rows.

    A run that diverges does not stop the other runs.

    Args:
        comparison: what to train.
        root: folder under which all runs are stored.
        make_callbacks: returns the callbacks of a run for its row's label and its seed.
        finished: called after each run.
    """
    cache = DataCache()
    _check_metric(comparison, root, cache)
    tasks = [
        Task(config, run_folder(config, root), make_callbacks(row.label, config.seed))
        for row in comparison.rows
        for config in row.configs
    ]
    outcomes = iter(zip(tasks, run_all(tasks, lambda index: finished(), cache), strict=True))
    results = []
    for row in comparison.rows:
        row_outcomes = [next(outcomes) for _ in row.configs]  # rows may differ in numbers of seeds
        failed = {
            task.config.seed: str(outcome)
            for task, outcome in row_outcomes
            if isinstance(outcome, DivergedError)
        }
        if failed:
            results.append(RowResult(row.label, (), (), failed=failed))
            continue
        folders = tuple(task.folder for task, _ in row_outcomes)
        summaries = tuple(
            outcome for _, outcome in row_outcomes if not isinstance(outcome, DivergedError)
        )
        curves = tuple(RunFolder(path).metrics() for path in folders)
        results.append(RowResult(row.label, folders, summaries, curves))
    return results


def _check_metric(comparison: Comparison, root: Path, cache: DataCache) -> None:
    """Raises before training if the metric is unknown, or if a run has no test set."""
    configs = [config for row in comparison.rows for config in row.configs]
    for config in configs:
        known = REGRESSION if config.training.loss == "mse" else CLASSIFICATION
        if comparison.metric not in known:
            raise InputError(unknown("metric", comparison.metric, known))
    # Each dataset is loaded once; a finished run is judged by its summary, without its data.
    has_test_set: dict[str, bool] = {}
    for config in configs:
        store = RunFolder(run_folder(config, root))
        key = store.path.name if store.done else same_data(config)
        if key not in has_test_set:
            has_test_set[key] = (
                "test" in store.summary()
                if store.done
                else cache.build_data(config).x_test is not None
            )
        # Runs of earlier versions have fewer metrics, and finished runs are not tested again.
        if store.done and comparison.metric not in store.summary().get("test", {comparison.metric}):
            raise InputError(
                f"{store.path} was made before '{comparison.metric}' was recorded. Compare by "
                "another metric, or make the run again in another folder of runs."
            )
        if not has_test_set[key]:
            raise InputError(
                "There is no test set to compare on: add x_test and y_test to the data."
            )


def same_data(config: Config) -> str:
    """Returns a key that is equal for configs with the same data settings, apart from the seed."""
    return repr({name: value for name, value in config.data.items() if name != "seed"})


def failures(results: Sequence[RowResult]) -> list[str]:
    """Returns one line per diverged run, with the error message."""
    return [
        f"{row.label}, seed {seed}: {reason}"
        for row in results
        for seed, reason in row.failed.items()
    ]


def exploded(results: Sequence[RowResult]) -> list[str]:
    """Returns one line per finished run whose loss has exploded; its results are worthless."""
    return [
        f"{row.label}, {folder.name}: {summary['diverged']}"
        for row in results
        for folder, summary in zip(row.folders, row.summaries, strict=True)
        if "diverged" in summary
    ]


def run_folder(config: Config, root: Path) -> Path:
    """Returns the default folder of a run: root/name/hash."""
    return root / config.name / config.hash()


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Returns mean and standard deviation over seeds (with ddof=1; 0 for one seed)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def changes_of(settings: Mapping[str, Any]) -> Values:
    """Returns a row's `set` as nested tables, e.g. {"a.b": 1} as {"a": {"b": 1}}."""
    changes: Values = {}
    for key, value in settings.items():
        nested = parse_setting(f"{key}=0")  # checks the key; the 0 is replaced below
        table = nested
        *path, last = key.split(".")
        for part in path:
            table = table[part]
        table[last] = value
        changes = merge_tables(changes, nested)
    return changes


def format_problems(error: ValidationError, table: type[Table]) -> str:
    """Returns the problems that pydantic found in a file, on one line."""
    return " ".join(sentence(item, table) for item in error.errors())
