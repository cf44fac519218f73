"""Shared by the benchmarks: machine description, timing, peak memory and a growing table."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..runtime.hardware import processor
from ..version import VERSION

Say = Callable[[str], None]


def machine(device: str) -> str:
    """The machine and the versions in use, on one line."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    where = f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads{load}"
    if device.startswith("cuda"):
        where = f"{torch.cuda.get_device_name()} ({where})"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{where}; {versions}, fedensemble {VERSION}"


def synchronize(device: str) -> None:
    """Waits until the GPU has finished; does nothing on a CPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def fastest(
    functions: Mapping[str, Callable[[], Any]], device: str, seconds: float
) -> dict[str, float]:
    """Seconds of the fastest call of each function, after one call of warm-up.

    The functions take turns, so that all meet the same load.

    Args:
        seconds: time to spend on each function; each is called at least twice.
    """
    for function in functions.values():
        function()
    synchronize(device)
    best, spent, calls = dict.fromkeys(functions, float("inf")), dict.fromkeys(functions, 0.0), 0
    while calls < 2 or any(value < seconds for value in spent.values()):
        for name, function in functions.items():
            if calls >= 2 and spent[name] >= seconds:
                continue
            started = time.perf_counter()
            function()
            synchronize(device)
            took = time.perf_counter() - started
            best[name], spent[name] = min(best[name], took), spent[name] + took
        calls += 1
    return best


class PeakMemory:
    """Peak memory of the GPU or the process beyond what was in use when the object was built."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            gc.collect()
            # Return freed memory to the system: reusing it later would not raise the peak.
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
            # Reset the peak. Where this is not possible, the peak is that of the whole process.
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self.before = resident_bytes()

    def __call__(self) -> int:
        """The peak so far, in bytes."""
        return max(
            0,
            (torch.cuda.max_memory_allocated() if self.cuda else resident_bytes(peak=True))
            - self.before,
        )


def resident_bytes(peak: bool = False) -> int:
    """Resident memory of the process in bytes, now or at its peak."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["VmHWM" if peak else "VmRSS"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class LiveTable:
    """A Markdown table that is printed row by row and stored.

    Args:
        title, header: title and column names.
        say: prints a line.
    """

    def __init__(self, title: str, header: Sequence[str], say: Say) -> None:
        self.title, self.header, self.say = title, tuple(header), say
        self.rows: list[tuple[str, ...]] = []
        rules = ["---", *["---:"] * (len(self.header) - 1)]
        for line in (f"\n{title}\n", self._line(self.header), self._line(rules)):
            say(line)

    def add(self, *cells: Any) -> None:
        """Prints a row and stores it."""
        self.rows.append(tuple(str(cell) for cell in cells))
        self.say(self._line(self.rows[-1]))

    @staticmethod
    def _line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"


def write(path: Path | None, device: str, tables: Sequence[LiveTable]) -> None:
    """Writes the tables as JSON unless `path` is None."""
    if path is not None:
        content = [
            {"title": table.title, "header": table.header, "rows": table.rows} for table in tables
        ]
        path.write_text(
            json.dumps({"machine": machine(device), "tables": content}, indent=1) + "\n",
            encoding="utf-8",
        )


def say(text: str) -> None:
    """Prints a line and flushes it."""
    print(text, flush=True)
