"""Trains several runs at once: runs with the same model and training advance in one batch.

Each run has its own folder, records, checkpoints and seed, and gives the results it would give
alone (up to the rounding of sums). A run that fails does not stop the others.
`run_groups.py` finds the runs that fit into one batch, `engines/local/run_visits.py` trains it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ...config.schema import Config
from ...core.types import RoundReport
from ...errors import DivergedError, FedEnsembleError
from ...federation.federation import Federation
from ..interrupt import Interruption, interruptible
from ..run import RunCallbacks, RunSteps, run_steps
from .data_cache import DataCache
from .run_groups import Groups, batch_key

# Runs that are open at the same time. Each holds its modes in memory, and its data unless another
# run has the same.
MAX_OPEN_RUNS = 64

Outcome = dict[str, Any] | DivergedError  # the summary, or the error of a run that has diverged


@dataclass(frozen=True)
class Task:
    """A run that is to be trained in a folder."""

    config: Config
    folder: Path
    callbacks: RunCallbacks


def run_all(
    tasks: Sequence[Task],
    finished: Callable[[int], None] = lambda index: None,
    cache: DataCache | None = None,
) -> list[Outcome]:
    """Trains all runs and returns their outcomes in order: summaries, or errors of divergence.

    Any other error is raised after the other runs have finished.

    Args:
        tasks: the runs.
        finished: called with the index of a task as soon as its run is done or has diverged.
        cache: from which the runs get their data.
    """
    outcomes: dict[int, Outcome] = {}
    failures: list[Exception] = []
    # Several rows of a table may be the same run, which is trained once.
    duplicates: dict[tuple[Path, str], list[int]] = {}
    for index, task in enumerate(tasks):
        duplicates.setdefault((task.folder, task.config.hash()), []).append(index)
    order = sorted(
        (indices[0] for indices in duplicates.values()),
        key=lambda index: _similarity_key(tasks[index].config),
    )

    def finish_duplicates(first: int) -> None:
        for index in duplicates[tasks[first].folder, tasks[first].config.hash()]:
            outcomes[index] = outcomes[first]
            finished(index)

    say = tasks[0].callbacks.on_message if tasks else print
    cache = cache or DataCache()
    with interruptible(say) as interruption:
        for _, group in groupby(order, key=lambda index: _similarity_key(tasks[index].config)):
            indices = list(group)
            for first in range(0, len(indices), MAX_OPEN_RUNS):
                open_tasks = {
                    index: tasks[index] for index in indices[first : first + MAX_OPEN_RUNS]
                }
                failures += _run_together(
                    open_tasks, cache, interruption, outcomes, finish_duplicates
                )
    if failures:
        raise failures[0]
    return [outcomes[index] for index in range(len(tasks))]


def _similarity_key(config: Config) -> str:
    """Returns a key that is equal for runs which may be batched; `batch_key` decides later."""
    return repr((config.model, config.training, config.engine, config.algorithm["name"]))


def _run_together(
    tasks: dict[int, Task],
    cache: DataCache,
    interruption: Interruption,
    outcomes: dict[int, Outcome],
    finished: Callable[[int], None],
) -> list[Exception]:
    """Trains some runs together, and returns all errors other than divergence.

    Each run is a generator (`run_steps`): it yields its federation when it needs a round, and is
    sent the report of that round. In between, the runs wait in `waiting`, and `Groups` trains one
    round of all of them.

    Args:
        tasks: the runs by index.
        cache: from which the runs get their data.
        interruption: set by Ctrl-C.
        outcomes: by index; summaries and divergence errors are added to it.
        finished: called with the index of each run that is done or has diverged.
    """
    failures: list[Exception] = []
    runs: dict[int, RunSteps] = {}
    waiting: dict[int, Federation] = {}

    def resume(index: int, report: RoundReport | None) -> None:
        """Lets a run continue to its next round or to its end."""
        try:
            waiting[index] = next(runs[index]) if report is None else runs[index].send(report)
        except StopIteration as end:
            outcomes[index] = dict(end.value)
            runs.pop(index)
            waiting.pop(index, None)
            finished(index)

    groups = Groups()

    def advance(federations: dict[int, Federation]) -> None:
        """Trains one round of some waiting runs, and resumes these runs."""
        interrupted = False
        for index, outcome in groups.advance(federations):
            try:
                if isinstance(outcome, Exception):
                    # The run must see the error, to record it and release its folder. It raises
                    # the error again.
                    runs[index].throw(outcome)
                else:
                    resume(index, outcome)
            except FedEnsembleError as error:
                waiting.pop(index)
                runs.pop(index).close()
                tasks[index].callbacks.on_error(error)
                if isinstance(error, DivergedError):
                    outcomes[index] = error
                    finished(index)
                else:
                    failures.append(error)
            except KeyboardInterrupt:
                # The other runs must save this round, too, before the command stops.
                waiting.pop(index)
                interrupted = True
        if interrupted:
            raise KeyboardInterrupt

    try:
        for index, task in tasks.items():
            runs[index] = run_steps(
                task.config, task.folder, task.callbacks, interruption, load_data=cache.build_data
            )
            resume(index, None)
            # A run that cannot be batched is trained to its end here, so that its memory is free
            # before the next run starts.
            unbatched = index in waiting and batch_key(waiting[index]) is None
            while unbatched and index in waiting:
                advance({index: waiting[index]})
        while waiting:
            advance(dict(waiting))
    finally:
        for run in runs.values():
            run.close()
    return failures
