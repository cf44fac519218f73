"""Several runs on the same data and seeds, as one table: rows of settings, a run for each seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, NonNegativeInt, ValidationError

from ..config.build import resolve_device
from ..config.messages import LONGEST_NAME, NAME, sentence
from ..config.plugin_tables import Table
from ..config.schema import Config, check, listed
from ..config.toml import Values, lay, merge, parse_setting, read_toml, with_settings
from ..errors import DivergedError, InputError, unknown
from ..metrics import CLASSIFICATION, REGRESSION
from .data_cache import DataCache
from .multi_run import Task, run_all
from .run import RunCallbacks
from .run_folder import RunFolder


class RowTable(Table):
    """One row: a label, and what it changes."""

    label: str
    set: dict[str, Any] = Field(default_factory=dict)


class ComparisonTable(Table):
    """A comparison file."""

    name: str = Field(default="compare", pattern=NAME, max_length=LONGEST_NAME)
    base: str
    seeds: list[NonNegativeInt] = Field(default=[0, 1, 2], min_length=1)
    metric: str = "accuracy"
    row: list[RowTable] = Field(min_length=1)


@dataclass(frozen=True)
class Row:
    """A line of a comparison: one config a seed."""

    label: str
    configs: tuple[Config, ...]


@dataclass(frozen=True)
class Comparison:
    """What is to be compared."""

    name: str
    metric: str
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]

    def folder(self, root: Path) -> Path:
        """Where its table goes."""
        hashes = json.dumps(
            [[row.label, *(config.hash() for config in row.configs)] for row in self.rows]
        )
        return root / self.name / f"compare-{sha256(hashes.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class RowResult:
    """A row's runs: their folders and summaries, one a seed; none of them where a run has
    diverged.
    """

    label: str
    folders: tuple[Path, ...]
    summaries: tuple[Mapping[str, Any], ...]
    curves: tuple[list[dict[str, Any]], ...] = field(default=())
    failed: Mapping[int, str] = field(default_factory=dict)  # why, by seed

    def values(self, metric: str) -> list[float]:
        """A metric of the last round, one a seed; empty where the runs have none."""
        return [s["test"][metric] for s in self.summaries if metric in s.get("test", {})]


def read_comparison(
    path: Path, settings: Sequence[str] = (), seeds: Sequence[int] | None = None
) -> Comparison:
    """The comparison a file describes; its base is a config file relative to it."""
    values = read_toml(path)
    try:
        table = ComparisonTable.model_validate(values)
    except ValidationError as error:
        raise InputError(
            f"{path} is no comparison file: {problems_of(error, ComparisonTable)}"
        ) from None
    base = with_settings(read_toml(path.parent / table.base), settings)
    changes = [(row.label, changes_of(row.set)) for row in table.row]
    return make_comparison(table.name, base, changes, seeds or table.seeds, table.metric)


def make_comparison(
    name: str,
    base: Mapping[str, Any],
    rows: Sequence[tuple[str, Values]],
    seeds: Sequence[int],
    metric: str,
) -> Comparison:
    """The comparison of some changes of a base, each with every seed."""
    if len(set(seeds)) < len(seeds):
        raise InputError(f"Each seed counts once; got {', '.join(map(str, seeds))}.")
    if len({label for label, _ in rows}) < len(rows):
        raise InputError(
            f"Rows need labels of their own; got {', '.join(label for label, _ in rows)}."
        )
    made, wrong = [], dict[tuple[str, ...], list[str]]()
    for label, changes in rows:
        values = merge(base, changes)
        checked = [check({**values, "seed": seed}) for seed in seeds]
        problems = tuple(dict.fromkeys(each for _, found in checked for each in found))
        if problems:
            wrong.setdefault(problems, []).append(label)
        made.append(
            Row(label, tuple(resolve_device(config) for config, _ in checked if config is not None))
        )
    if wrong:
        raise InputError("\n".join(_who(labels) + listed(found) for found, labels in wrong.items()))
    return Comparison(name, metric, tuple(made), tuple(seeds))


def _who(labels: Sequence[str]) -> str:
    """The subject of a sentence about some rows' problems, and its verb."""
    several = len(labels) > 1
    quoted = ", ".join(f"'{label}'" for label in labels)
    return f"row{'s' * several} {quoted} {'have' if several else 'has'} "


def compare(
    comparison: Comparison,
    root: Path,
    watch: Callable[[str, int], RunCallbacks],
    finished: Callable[[], None],
) -> list[RowResult]:
    """Runs everything that is not finished yet; what was finished before costs nothing.

    A run that diverges keeps nothing from the others.

    Args:
        watch: given a row's label and a seed, who watches that run.
        finished: called after each run.
    """
    shelf = DataCache()
    _check_tests(comparison, root, shelf)
    tasks = [
        Task(config, run_folder(config, root), watch(row.label, config.seed))
        for row in comparison.rows
        for config in row.configs
    ]
    outcomes = iter(zip(tasks, run_all(tasks, lambda place: finished(), shelf), strict=True))
    results = []
    for row in comparison.rows:
        mine = [next(outcomes) for _ in row.configs]  # rows may have numbers of seeds of their own
        failed = {
            task.config.seed: str(end) for task, end in mine if isinstance(end, DivergedError)
        }
        if failed:
            results.append(RowResult(row.label, (), (), failed=failed))
            continue
        folders = tuple(task.folder for task, _ in mine)
        summaries = tuple(end for _, end in mine if not isinstance(end, DivergedError))
        results.append(
            RowResult(
                row.label, folders, summaries, tuple(RunFolder(path).metrics() for path in folders)
            )
        )
    return results


def _check_tests(comparison: Comparison, root: Path, shelf: DataCache) -> None:
    """Raises before anything is trained if runs will not have, or finished ones do not have, what
    is compared.
    """
    configs = [config for row in comparison.rows for config in row.configs]
    for config in configs:
        known = REGRESSION if config.training.loss == "mse" else CLASSIFICATION
        if comparison.metric not in known:
            raise InputError(unknown("metric", comparison.metric, known))
    tested: dict[str, bool] = {}
    for config in configs:
        store = RunFolder(run_folder(config, root))
        data = store.path.name if store.done else same_data(config)
        if data not in tested:
            tested[data] = (
                "test" in store.summary()
                if store.done
                else shelf.build_data(config).x_test is not None
            )
        if not tested[data]:
            raise InputError("There is no test set to compare on: give the data x_test and y_test.")


def same_data(config: Config) -> str:
    """What runs on the same data have in common, whatever their seeds."""
    return repr({name: value for name, value in config.data.items() if name != "seed"})


def failures(results: Sequence[RowResult]) -> list[str]:
    """Which runs have diverged, and how, a line each."""
    return [
        f"{row.label}, seed {seed}: {reason}"
        for row in results
        for seed, reason in row.failed.items()
    ]


def run_folder(config: Config, root: Path) -> Path:
    """Where a run goes unless it is told otherwise: root/name/hash."""
    return root / config.name / config.hash()


def summarise(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds (unbiased; 0 for one seed)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def changes_of(settings: Mapping[str, Any]) -> Values:
    """A row's `set`: dotted keys become tables."""
    changes: Values = {}
    for key, value in settings.items():
        nested = parse_setting(f"{key}=0")
        holder = nested
        *path, last = key.split(".")
        for part in path:
            holder = holder[part]
        holder[last] = value
        changes = lay(changes, nested)
    return changes


def problems_of(error: ValidationError, table: type[Table]) -> str:
    """What is wrong with a file, in one line."""
    return " ".join(sentence(item, table) for item in error.errors())
