"""Measures how much time each phase of a round takes.

While a run is profiled, the functions that make up the phases are replaced by timed wrappers.
Without profiling the code is unchanged and has no overhead.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from ..checkpoint_file import write_json
from ..core.engine import engines
from ..federation.federation import Federation
from . import run as run_module
from .storage.run_folder import RunFolder

FILE = "profile.json"
PLANNING, PREPARING, TRAINING = "planning", "preparing and gathering", "local training"
AGGREGATION, SERVER, EVALUATION, WRITING = "aggregation", "server update", "evaluation", "writing"
PHASES = (PLANNING, PREPARING, TRAINING, AGGREGATION, SERVER, EVALUATION, WRITING)
# The round, counted from 1 in this process, that torch.profiler records. The profiler slows it
# down, so this round does not count towards the times of the phases.
_RECORDED_ROUND = 3
_MAX_OPERATIONS = 12
# A log level above all others: otherwise torch.profiler prints when it starts and stops.
_KINETO_SILENT = "99"


class Profile:
    """Seconds per phase. Time spent in a nested phase counts for the nested phase only."""

    def __init__(self) -> None:
        self.cuda = False
        self.rounds = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.operations: list[dict[str, Any]] = []
        # Milliseconds of GPU kernels in the recorded round; None on a CPU.
        self.busy: float | None = None
        self._stack: list[tuple[str, float]] = []  # open phases, and since when they are charged
        self._recorder: Any = None
        self._in_round = False

    def now(self) -> float:
        """Returns the time after the GPU has finished all work that was launched."""
        self.cuda = self.cuda or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def wrapped(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Returns the function with its time added to a phase."""

        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            self._enter(phase)
            try:
                return function(*args, **options)
            finally:
                self._leave()

        return timed

    def _enter(self, phase: str) -> None:
        if phase in (SERVER, PLANNING) and not self._stack and not self._in_round:
            self._begin_round()
        now = self.now()
        if self._stack:
            outer, since = self._stack[-1]
            self._add(outer, now - since)
        self._stack.append((phase, now))

    def _leave(self) -> None:
        phase, since = self._stack.pop()
        now = self.now()
        self._add(phase, now - since)
        if self._stack:
            self._stack[-1] = (self._stack[-1][0], now)
        elif phase == SERVER:
            self._end_round()

    def _add(self, phase: str, seconds: float) -> None:
        if self._recorder is None:
            self.seconds[phase] += seconds

    def _begin_round(self) -> None:
        self.rounds += 1
        self._in_round = True
        if self.rounds == _RECORDED_ROUND:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if self.cuda else []
            self._recorder = torch.profiler.profile(activities=activities)
            self._recorder.__enter__()

    def _end_round(self) -> None:
        self._in_round = False
        if self._recorder is None:
            return
        recorder, self._recorder = self._recorder, None
        recorder.__exit__(None, None, None)
        operations = [
            {
                "name": event.key,
                "calls": event.count,
                "cpu_ms": event.self_cpu_time_total / 1000,
                "device_ms": event.self_device_time_total / 1000,
            }
            for event in recorder.key_averages()
        ]
        by = "device_ms" if self.cuda else "cpu_ms"
        self.operations = sorted(operations, key=lambda each: -each[by])[:_MAX_OPERATIONS]
        self.busy = sum(each["device_ms"] for each in operations) if self.cuda else None

    def stop(self) -> None:
        """Ends the recording of a round that has failed."""
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self._recorder = None

    def facts(self) -> dict[str, Any]:
        """Returns the profile as plain values; times are means per round."""
        timed = max(1, self.rounds - (self.rounds >= _RECORDED_ROUND))
        total = sum(self.seconds.values()) or 1.0
        phases = {
            name: {"ms": 1000 * self.seconds[name] / timed, "share": self.seconds[name] / total}
            for name in PHASES
        }
        device = {} if self.busy is None else {"device_ms": self.busy}
        return {
            "rounds": timed,
            "ms": 1000 * total / timed,
            **device,
            "phases": phases,
            "operations": self.operations,
        }

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes the profile to a run's folder, and returns it."""
        write_json(folder / FILE, self.facts())
        return self.facts()


@contextmanager
def profiling() -> Iterator[Profile]:
    """Context in which runs are timed.

    On a GPU, the start and the end of each phase wait for the GPU, which slows training down.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
    profile = Profile()
    targets: list[tuple[Any, str, str]] = [  # owner, name of the function, phase
        (Federation, "run_round", SERVER),
        (Federation, "next_request", PLANNING),
        (run_module, "evaluate_run", EVALUATION),
        (RunFolder, "append_metrics", WRITING),
        (RunFolder, "save", WRITING),
    ]
    classes = {base for name in engines for base in engines[name].__mro__}
    methods = (("run_visits", AGGREGATION), ("prepare", PREPARING), ("train", TRAINING))
    targets += [(c, name, phase) for c in classes for name, phase in methods if _defines(c, name)]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in targets]
    try:
        for owner, name, phase in targets:
            setattr(owner, name, profile.wrapped(getattr(owner, name), phase))
        yield profile
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
        profile.stop()


def _defines(cls: type, name: str) -> bool:
    """Returns whether a class itself, not a base class, implements a method."""
    method = vars(cls).get(name)
    return callable(method) and not getattr(method, "__isabstractmethod__", False)
