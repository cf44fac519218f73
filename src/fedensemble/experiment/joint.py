"""Several runs at once: those whose visits fit into one program advance together, round by round.

Each run keeps its folder, records, checkpoints and seed, and gives the results it gives alone (up to the rounding of
sums). A run that fails keeps nothing from the others: they go on to their end, then its error is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ..core.algorithm import Algorithm
from ..core.types import RoundReport
from ..engines.simulation import Simulation
from ..engines.together import RATES, share_data, visit_together
from ..errors import FedEnsembleError
from ..federation import Federation
from .config import Config
from .interruption import Interruption, interruptible
from .run import Watcher, Work, carry_out
from .shelf import Shelf

MOST = 48  # runs at a time: each holds its own modes, and data where nobody has the same
_SHARE = 0.2  # of a device's free memory that data put together may take
_ON_CPU = 4 << 30


@dataclass(frozen=True)
class Task:
    """A run to be carried out."""

    config: Config
    folder: Path
    watcher: Watcher


def run_all(tasks: Sequence[Task], finished: Callable[[int], None] = lambda place: None) -> list[dict[str, Any]]:
    """The summaries of some runs, in their order.

    Args:
        finished: called with a run's place as soon as it is done.
    """
    summaries: dict[int, dict[str, Any]] = {}
    failures: list[Exception] = []
    twins: dict[tuple[Path, str], list[int]] = {}  # rows of a table may be the same run: it is carried out once
    for place, task in enumerate(tasks):
        twins.setdefault((task.folder, task.config.hash()), []).append(place)
    order = sorted((places[0] for places in twins.values()), key=lambda place: _alike(tasks[place].config))

    def done(first: int) -> None:
        for place in twins[tasks[first].folder, tasks[first].config.hash()]:
            summaries[place] = summaries[first]
            finished(place)

    say = tasks[0].watcher.say if tasks else print
    shelf = Shelf()
    with interruptible(say) as interruption:
        for _, group in groupby(order, key=lambda place: _alike(tasks[place].config)):
            places = list(group)
            for first in range(0, len(places), MOST):
                chosen = places[first : first + MOST]
                failures += _carry_out({place: tasks[place] for place in chosen}, shelf, interruption, summaries, done)
    if failures:
        raise failures[0]
    return [summaries[place] for place in range(len(tasks))]


def _alike(config: Config) -> str:
    """What runs that may fit together have in common; the rest is looked at once they are built."""
    return repr((config.model, config.training, config.engine, config.algorithm["name"]))


def _carry_out(
    tasks: dict[int, Task], shelf: Shelf, interruption: Interruption, summaries: dict[int, dict[str, Any]],
    finished: Callable[[int], None],
) -> list[Exception]:  # fmt: skip
    """Carries out some runs together, from opening their folders to their summaries; what went wrong is returned."""
    failures: list[Exception] = []
    works: dict[int, Work] = {}
    waiting: dict[int, Federation] = {}

    def go_on(place: int, report: RoundReport | None) -> None:
        try:
            waiting[place] = next(works[place]) if report is None else works[place].send(report)
        except StopIteration as end:
            summaries[place] = dict(end.value)
            works.pop(place)
            waiting.pop(place, None)
            finished(place)

    groups = Groups()

    def advance(runs: dict[int, Federation]) -> None:
        stopped = False
        for place, outcome in groups.advance(runs):
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                go_on(place, outcome)
            except FedEnsembleError as error:
                failures.append(error)
                waiting.pop(place)
                works.pop(place).close()
                if len(tasks) > 1:
                    tasks[place].watcher.say(f"{error} ({tasks[place].folder}; the other runs go on)")
            except KeyboardInterrupt:  # each run saves its round before it stops
                waiting.pop(place)
                stopped = True
        if stopped:
            raise KeyboardInterrupt

    try:
        for place, task in tasks.items():
            works[place] = carry_out(task.config, task.folder, task.watcher, interruption, read=shelf.build_data)
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


class Groups:
    """Which runs fit into one program; found when they change."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, ...], list[list[int]]] = {}
        self._apart: set[Hashable] = set()

    def advance(self, runs: dict[int, Federation]) -> list[tuple[int, RoundReport | Exception]]:
        """One more round of each run, or what went wrong in it."""
        together = self._of.get(tuple(runs))
        if together is None:
            together = self._of[tuple(runs)] = self._find(runs)
        outcomes: list[tuple[int, RoundReport | Exception]] = []
        for places in together:
            outcomes += zip(places, self._round([runs[place] for place in places]), strict=True)
        return outcomes

    def _find(self, runs: dict[int, Federation]) -> list[list[int]]:
        found: dict[Hashable, list[int]] = {}
        for place, federation in runs.items():
            found.setdefault(kind(federation, self._apart) or ("alone", place), []).append(place)
        groups = [part for places in found.values() for part in _parts(places, runs)]
        for places in groups:
            share_data(_engines([runs[place] for place in places]))
        return groups

    def _round(self, federations: list[Federation]) -> list[RoundReport | Exception]:
        started = time.perf_counter()
        requests = [federation.ask() for federation in federations]
        try:
            if len(federations) == 1:
                answers = [federations[0].engine.visit(*requests[0])]
            else:
                answers = visit_together(_engines(federations), requests)
        except FedEnsembleError as error:
            return [error] * len(federations)
        except (RuntimeError, TypeError, ValueError):
            # A method may look at its numbers ("if self.mu > 0"), which cannot be done for several runs at once.
            if len({federation.algorithm for federation in federations}) == 1:
                raise
            self._apart.add(type(federations[0].algorithm))
            self._of.clear()
            return [outcome for federation in federations for outcome in self._round([federation])]
        for federation in federations:
            federation.foresee()
        outcomes: list[RoundReport | Exception] = []
        for federation, request, answer in zip(federations, requests, answers, strict=True):
            try:
                outcomes.append(federation.conclude(request, answer))
            except FedEnsembleError as error:
                outcomes.append(error)
        for federation in federations:
            federation.seconds += (time.perf_counter() - started) / len(federations)
        return outcomes


def _engines(federations: Sequence[Federation]) -> list[Simulation]:
    engines = (federation.engine for federation in federations)
    return [engine for engine in engines if isinstance(engine, Simulation)]


def kind(federation: Federation, apart: Collection[Hashable] = ()) -> Hashable:
    """Runs of the same model, training and engine that are also of the same kind can train in one block; None never."""
    engine, data, learner = federation.engine, federation.data, federation.learner
    if not isinstance(engine, Simulation) or not engine.batched:
        return None
    if data.x.nbytes > _room(learner.device) / 4:
        return None
    facts = (data.x.shape[1:], data.x.dtype, data.y.shape[1:], data.y.dtype, data.classes, data.standardise)
    return federation.work, facts, _method(federation.algorithm, type(federation.algorithm) in apart)


def _parts(places: Sequence[int], runs: Mapping[int, Federation]) -> list[list[int]]:
    """Runs of one kind in parts whose data there is room for, put together; data that are together cost nothing."""
    if len(places) == 1:
        return [list(places)]
    room = _room(runs[places[0]].learner.device)
    parts: list[list[int]] = [[]]
    held: dict[int, int] = {}
    for place, engine in zip(places, _engines([runs[place] for place in places]), strict=True):
        held[id(engine.data.x)] = engine.data.x.nbytes
        if parts[-1] and len(held) > 1 and sum(held.values()) > room:
            parts.append([])
            held = {id(engine.data.x): engine.data.x.nbytes}
        parts[-1].append(place)
    return parts


def _room(device: torch.device) -> float:
    """Bytes that data put together may take."""
    return _ON_CPU if device.type == "cpu" else _SHARE * torch.cuda.mem_get_info(device)[0]


def _method(algorithm: Algorithm, whole: bool) -> Hashable:
    """A method without the numbers that may differ between runs."""
    if whole:
        return algorithm
    named = {field.name: getattr(algorithm, field.name) for field in fields(algorithm)}
    return type(algorithm), *((n, v) for n, v in named.items() if not isinstance(v, float) and n not in RATES)
