"""Searches hyperparameters: batches of trials, each trained as one program where that is possible.

A search is a function of its record. The next batch is proposed by a sampler that is built from
the finished trials and a seed, and the trials are runs in folders of their own. A search that was
killed therefore continues where it stopped, and the record is a JSON file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ... import durable
from ...config.build import resolve_device
from ...config.schema import Config, check, join_problems, resolve
from ...config.search_space import Space
from ...config.toml import Values, merge, with_settings
from ...errors import DivergedError, InputError, StoreError, unknown
from ..run import RunCallbacks
from ..storage.read_json import read_table
from ..storage.run_folder import RunFolder
from .compare import run_folder
from .data_cache import DataCache
from .multi_run import Task, run_all
from .propose import Settings, propose

VALIDATION = 0.1  # share of the training data that trials are tested on
RECORD = "trials.json"
# Objectives, and whether higher is better.
CLASSIFICATION = {"accuracy": True, "nll": False, "brier": False}
REGRESSION = {"mse": False, "crps": False}


@dataclass(frozen=True)
class Trial:
    """A trial of a search.

    Args:
        settings: by key, as they are typed.
        values: the objective on validation data, one per seed; empty before the end.
        diverged: why it has diverged; empty otherwise.
    """

    settings: Settings
    values: tuple[float, ...] = ()
    diverged: str = ""

    @property
    def ended(self) -> bool:
        """Whether it has been trained."""
        return bool(self.values or self.diverged)

    @property
    def value(self) -> float | None:
        """The mean over seeds; None without a result."""
        return float(np.mean(self.values)) if self.values else None


@dataclass(frozen=True)
class Search:
    """What is searched.

    Args:
        values: of the config, with fixed overrides.
        spaces: of the settings that are searched.
        metric: the objective.
        seeds: each trial is trained with all of them.
    """

    values: Values
    spaces: tuple[Space, ...]
    metric: str
    seeds: tuple[int, ...]

    @property
    def maximize(self) -> bool:
        """Whether higher values of the objective are better."""
        return (CLASSIFICATION | REGRESSION)[self.metric]

    def config(self, settings: Settings, seed: int) -> Config:
        """Returns the config of a run, which is tested on validation data."""
        texts = [f"{key}={text}" for key, text in settings.items()]
        values = with_settings(_on_validation_data(self.values), texts)
        return resolve_device(resolve({**values, "seed": seed}, f"the trial {' '.join(texts)}"))

    def best_config(self, trials: Sequence[Trial]) -> Config:
        """Returns the config with the settings of the best trial, for training on all data."""
        settings = [f"{key}={text}" for key, text in self.best(trials).settings.items()]
        return resolve(with_settings(self.values, settings))

    def best(self, trials: Sequence[Trial]) -> Trial:
        """Returns the trial with the best mean over seeds; raises if all have diverged."""
        if ranked := self.ranked(trials):
            return ranked[0]
        raise DivergedError(
            "All trials have diverged. Search smaller learning rates, or set "
            "algorithm.optimizer.clip."
        )

    def ranked(self, trials: Sequence[Trial]) -> list[Trial]:
        """Returns the trials with results, best first."""
        sign = -1 if self.maximize else 1
        finished = [(sign * trial.value, trial) for trial in trials if trial.value is not None]
        return [trial for _, trial in sorted(finished, key=lambda pair: pair[0])]

    def folder(self, root: Path) -> Path:
        """Returns the folder of the record; its name contains a hash of what is searched."""
        config = resolve(_on_validation_data(self.values))
        what = [config.hash(), [repr(space) for space in self.spaces], self.metric, self.seeds]
        return root / config.name / f"tune-{sha256(json.dumps(what).encode()).hexdigest()[:12]}"


def make_search(
    values: Values,
    spaces: Sequence[Space],
    metric: str | None = None,
    seeds: Sequence[int] | None = None,
) -> Search:
    """Returns a search; raises InputError if a setting does not accept its space.

    Args:
        values: of the config, with fixed overrides.
        spaces: of the settings that are searched.
        metric: the objective; by default the accuracy, or for regression the mean squared error.
        seeds: by default the seed of the config.
    """
    if not spaces:
        raise InputError(
            "There is nothing to search: give a range or choices, such as "
            "--set algorithm.lr=log:0.01..1 or --set 'algorithm=fedavg|fedprox'."
        )
    for space in spaces:
        if space.key == "seed":
            raise InputError("The seed is not searched: give several with --seeds 0,1,2.")
    first = [f"{space.key}={space.ends[0]}" for space in spaces]
    _check_spaces(values, spaces, first)
    config = resolve(with_settings(values, first))
    known = REGRESSION if config.training.loss == "mse" else CLASSIFICATION
    metric = metric or next(iter(known))
    if metric not in known:
        raise InputError(unknown("objective", metric, known))
    chosen = tuple(seeds or [config.seed])
    if len(set(chosen)) < len(chosen):
        raise InputError(f"Seeds must be distinct; got {', '.join(map(str, chosen))}.")
    return Search(values, tuple(spaces), metric, chosen)


def _check_spaces(values: Values, spaces: Sequence[Space], first: Sequence[str]) -> None:
    """Raises InputError with all problems of the bounds and choices of the spaces.

    Args:
        values: of the config.
        spaces: to check.
        first: the first bound or choice of each space, as "key=value".
    """
    problems: list[str] = []
    _, of_all = check(with_settings(_on_validation_data(values), first))
    for at, space in enumerate(spaces):
        for end in space.ends:
            settings = [*first[:at], f"{space.key}={end}", *first[at + 1 :]]
            _, found = check(with_settings(_on_validation_data(values), settings))
            # A mistake in the config itself is reported once.
            problems += [
                f"{space.key} = {end}: {problem}" for problem in found if problem not in of_all
            ]
    if problems := list(dict.fromkeys([*of_all, *problems])):
        raise InputError(f"The search has {join_problems(problems)}")


def _on_validation_data(values: Values) -> Values:
    """Returns the settings of trials: they are tested on a part of the training data.

    The choice must not see the test set, which `data.validation` drops.
    """
    changes: Values = {"name": f"{values.get('name', 'run')}-tune"}
    data = values.get("data")
    if not isinstance(data, dict) or data.get("validation") is None:
        changes["data"] = {"validation": VALIDATION}
    return merge(values, changes)


def tune(
    search: Search,
    root: Path,
    trials: int,
    batch: int,
    make_callbacks: Callable[[int, Settings, int], RunCallbacks],
    finished: Callable[[], None],
    cache: DataCache | None = None,
) -> list[Trial]:
    """Trains trials until there are `trials`, and returns all of them in order.

    Trials in the record of an earlier call are not trained again. There are fewer if all values of
    the spaces have been tried.

    Args:
        search: what is searched.
        root: folder under which all runs are stored.
        trials: number of trials.
        batch: trials that are proposed and trained together.
        make_callbacks: returns the callbacks of a run for the trial's index, its settings, a seed.
        finished: called after each run, also for those of earlier calls.
        cache: from which the runs get their data.
    """
    file, cache = search.folder(root) / RECORD, cache or DataCache()
    record = read_trials(file)
    begun = {index for index, trial in enumerate(record) if not trial.ended}
    for _ in range(len(search.seeds) * sum(trial.ended for trial in record)):
        finished()
    while True:
        if all(trial.ended for trial in record):
            count = min(batch, trials - len(record))
            proposed = _propose(search, record, count)
            if not proposed:
                return record
            record += [Trial(settings) for settings in proposed]
            # Before they are trained: after a kill the same trials continue.
            _write(file, record)
        pending = [index for index, trial in enumerate(record) if not trial.ended]
        configs = {
            (index, seed): search.config(record[index].settings, seed)
            for index in pending
            for seed in search.seeds
        }
        for (index, _), config in configs.items():
            # After a power cut, the runs of a batch may have incomplete files, see below.
            store = RunFolder(run_folder(config, root))
            if index in begun and store.path.exists() and not store.intact(config):
                store.delete()
        tasks = [
            Task(
                config,
                run_folder(config, root),
                # A diverged trial has no result, so that its remaining rounds are not needed. The
                # results of all are in one table, and the best trial is trained again on all data.
                replace(
                    make_callbacks(index, record[index].settings, seed),
                    stop_exploded=True,
                    results_only=True,
                ),
            )
            for (index, seed), config in configs.items()
        ]
        # The files of all runs are synced together, at checkpoints and before the record says that
        # the trials have ended. Most of a short trial's time would be waiting for the disk.
        with durable.sync_later():
            outcomes = iter(run_all(tasks, lambda index: finished(), cache))
        for index in pending:
            record[index] = _result(record[index], search, [next(outcomes) for _ in search.seeds])
        _write(file, record)


def _propose(search: Search, record: Sequence[Trial], count: int) -> list[Settings]:
    if count <= 0:
        return []
    results = [(trial.settings, trial.value) for trial in record]
    return propose(search.spaces, results, count, search.maximize, search.seeds[0] + len(record))


def _result(trial: Trial, search: Search, outcomes: Sequence[Any]) -> Trial:
    """Returns the trial with the results of its runs, one per seed."""
    errors = [str(outcome) for outcome in outcomes if isinstance(outcome, DivergedError)]
    # A run that was finished by another command may have exploded without being stopped.
    errors += [
        outcome["diverged"]
        for outcome in outcomes
        if not isinstance(outcome, DivergedError) and "diverged" in outcome
    ]
    if errors:
        return replace(trial, diverged=errors[0])
    if any("test" not in outcome for outcome in outcomes):
        raise InputError(
            "The validation data have no example: raise data.validation, the share of the training "
            "data that trials are tested on."
        )
    return replace(trial, values=tuple(outcome["test"][search.metric] for outcome in outcomes))


def read_trials(file: Path) -> list[Trial]:
    """Returns the trials in a record; none if there is no record yet."""
    if not file.exists():
        return []
    try:
        return [
            Trial(_settings(each["settings"]), tuple(map(float, each["values"])), each["diverged"])
            for each in read_table(file)["trials"]
        ]
    except (KeyError, TypeError, ValueError):
        raise StoreError(f"{file} is damaged. Delete it; finished runs are not lost.") from None


def _settings(table: Any) -> Settings:
    if not all(isinstance(text, str) for pair in table.items() for text in pair):
        raise ValueError
    return dict(table)


def _write(file: Path, record: Sequence[Trial]) -> None:
    durable.write_json(file, {"trials": [asdict(trial) for trial in record]})
