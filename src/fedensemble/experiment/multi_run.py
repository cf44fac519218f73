"""Several runs at once: those whose visits fit into one program advance together, round by round.

Each run keeps its folder, records, checkpoints and seed, and gives the results it gives alone (up
to the rounding of sums). A run that fails keeps nothing from the others: they go on to their end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..config.schema import Config
from ..core.types import RoundReport
from ..errors import DivergedError, FedEnsembleError
from ..federation.federation import Federation
from .data_cache import DataCache
from .interrupt import Interruption, interruptible
from .run import RunCallbacks, Work, run_steps
from .run_groups import Groups, kind

MOST = 48  # runs at a time: each holds its own modes, and data where nobody has the same

Outcome = dict[str, Any] | DivergedError  # a summary, or what went wrong


@dataclass(frozen=True)
class Task:
    """A run to be carried out."""

    config: Config
    folder: Path
    watcher: RunCallbacks


def run_all(
    tasks: Sequence[Task],
    finished: Callable[[int], None] = lambda place: None,
    shelf: DataCache | None = None,
) -> list[Outcome]:
    """The summaries of some runs, in their order; in place of a summary, why a run has diverged.

    Any other failure is raised once the others are at their end.

    Args:
        finished: called with a run's place as soon as it is done, or has diverged.
        shelf: where the runs' data are read.
    """
    outcomes: dict[int, Outcome] = {}
    failures: list[Exception] = []
    # rows of a table may be the same run: it is carried out once
    twins: dict[tuple[Path, str], list[int]] = {}
    for place, task in enumerate(tasks):
        twins.setdefault((task.folder, task.config.hash()), []).append(place)
    order = sorted(
        (places[0] for places in twins.values()), key=lambda place: _alike(tasks[place].config)
    )

    def done(first: int) -> None:
        for place in twins[tasks[first].folder, tasks[first].config.hash()]:
            outcomes[place] = outcomes[first]
            finished(place)

    say = tasks[0].watcher.say if tasks else print
    shelf = shelf or DataCache()
    with interruptible(say) as interruption:
        for _, group in groupby(order, key=lambda place: _alike(tasks[place].config)):
            places = list(group)
            for first in range(0, len(places), MOST):
                chosen = places[first : first + MOST]
                failures += _carry_out(
                    {place: tasks[place] for place in chosen}, shelf, interruption, outcomes, done
                )
    if failures:
        raise failures[0]
    return [outcomes[place] for place in range(len(tasks))]


def _alike(config: Config) -> str:
    """What runs that may fit together have in common; the rest is looked at once they are built."""
    return repr((config.model, config.training, config.engine, config.algorithm["name"]))


def _carry_out(
    tasks: dict[int, Task],
    shelf: DataCache,
    interruption: Interruption,
    outcomes: dict[int, Outcome],
    finished: Callable[[int], None],
) -> list[Exception]:
    """Carries out some runs together, from opening their folders to their ends; what else went
    wrong is returned.
    """
    failures: list[Exception] = []
    works: dict[int, Work] = {}
    waiting: dict[int, Federation] = {}

    def go_on(place: int, report: RoundReport | None) -> None:
        try:
            waiting[place] = next(works[place]) if report is None else works[place].send(report)
        except StopIteration as end:
            outcomes[place] = dict(end.value)
            works.pop(place)
            waiting.pop(place, None)
            finished(place)

    groups = Groups()

    def advance(runs: dict[int, Federation]) -> None:
        stopped = False
        for place, outcome in groups.advance(runs):
            try:
                if isinstance(outcome, Exception):
                    works[place].throw(outcome)  # and it comes back: the run must know
                else:
                    go_on(place, outcome)
            except FedEnsembleError as error:
                waiting.pop(place)
                works.pop(place).close()
                tasks[place].watcher.failed(error)
                if isinstance(error, DivergedError):
                    outcomes[place] = error
                    finished(place)
                else:
                    failures.append(error)
            except KeyboardInterrupt:  # each run saves its round before it stops
                waiting.pop(place)
                stopped = True
        if stopped:
            raise KeyboardInterrupt

    try:
        for place, task in tasks.items():
            works[place] = run_steps(
                task.config, task.folder, task.watcher, interruption, read=shelf.build_data
            )
            go_on(place, None)
            alone = place in waiting and kind(waiting[place]) is None
            while alone and place in waiting:  # to its end, before the next one takes memory, too
                advance({place: waiting[place]})
        while waiting:
            advance(dict(waiting))
    finally:
        for work in works.values():
            work.close()
    return failures
