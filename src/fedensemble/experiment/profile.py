"""Where a round's time goes: functions are wrapped while a run is profiled, and left alone
otherwise.
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

from ..checkpoint import write_json
from ..core.engine import engines
from ..federation.federation import Federation
from . import run as running
from .run_folder import RunFolder

FILE = "profile.json"
PLANNING, PREPARING, TRAINING = "planning", "preparing and gathering", "local training"
AGGREGATION, SERVER, EVALUATION, WRITING = "aggregation", "server update", "evaluation", "writing"
PHASES = (PLANNING, PREPARING, TRAINING, AGGREGATION, SERVER, EVALUATION, WRITING)
# the round, counted from 1 in this process, whose operations are recorded; it is not timed
_LOOKED_AT = 3
_OPERATIONS = 12
_SILENT = "99"  # above all levels: torch's profiler would print where it starts and stops


class Profile:
    """Seconds by phase. A phase's time is its own: that of a phase inside it goes to that phase."""

    def __init__(self) -> None:
        self.cuda = False
        self.rounds = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.operations: list[dict[str, Any]] = []
        # ms the card was at work in the round whose operations were recorded
        self.busy: float | None = None
        self._stack: list[tuple[str, float]] = []
        self._recording: Any = None

    def now(self) -> float:
        """The time, once the card is done with what it was asked for."""
        self.cuda = self.cuda or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def wrapped(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The function, its time counted."""

        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            self._enter(phase)
            try:
                return function(*args, **options)
            finally:
                self._leave()

        return timed

    def _enter(self, phase: str) -> None:
        if phase == PLANNING and not self._stack:
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
        if self._recording is None:
            self.seconds[phase] += seconds

    def _begin_round(self) -> None:
        self.rounds += 1
        if self.rounds == _LOOKED_AT:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if self.cuda else []
            self._recording = torch.profiler.profile(activities=kinds)
            self._recording.__enter__()

    def _end_round(self) -> None:
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        recording.__exit__(None, None, None)
        found = [
            {
                "name": event.key,
                "calls": event.count,
                "cpu_ms": event.self_cpu_time_total / 1000,
                "device_ms": event.self_device_time_total / 1000,
            }
            for event in recording.key_averages()
        ]
        by = "device_ms" if self.cuda else "cpu_ms"
        self.operations = sorted(found, key=lambda event: -event[by])[:_OPERATIONS]
        self.busy = sum(event["device_ms"] for event in found) if self.cuda else None

    def stop(self) -> None:
        """Ends a recording that a failed round left behind."""
        if self._recording is not None:
            self._recording.__exit__(None, None, None)
            self._recording = None

    def facts(self) -> dict[str, Any]:
        """The profile as plain values; times are those of a round on average."""
        timed = max(1, self.rounds - (self.rounds >= _LOOKED_AT))
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
        """Writes the profile to a run's folder, and gives it."""
        write_json(folder / FILE, self.facts())
        return self.facts()


@contextmanager
def profiling() -> Iterator[Profile]:
    """Within it, whatever a run does is timed. On a GPU every phase waits for the card, which costs
    some speed.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    profile = Profile()
    places: list[tuple[Any, str, str]] = [
        (Federation, "ask", PLANNING),
        (Federation, "conclude", SERVER),
        (running, "test", EVALUATION),
        (RunFolder, "append_metrics", WRITING),
        (RunFolder, "save", WRITING),
    ]
    kinds = {kind for name in engines for kind in engines[name].__mro__}
    inside = (("visit", AGGREGATION), ("prepare", PREPARING), ("train", TRAINING))
    places += [(kind, name, phase) for kind in kinds for name, phase in inside if _has(kind, name)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, phase in places:
            setattr(owner, name, profile.wrapped(getattr(owner, name), phase))
        yield profile
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
        profile.stop()


def _has(kind: type, name: str) -> bool:
    """Whether a class defines a method itself, and not only in name."""
    method = vars(kind).get(name)
    return callable(method) and not getattr(method, "__isabstractmethod__", False)
