"""What benchmarks share: the machine in words, time, memory, and a table that grows line by
line.
"""

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
    """Machine and versions on one line."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    where = f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads{load}"
    if device.startswith("cuda"):
        where = f"{torch.cuda.get_device_name()} ({where})"
    return f"{where}; Python {platform.python_version()}, torch {torch.__version__}, fedensemble {VERSION}"


def wait(device: str) -> None:
    """Until the card is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def fastest(ways: Mapping[str, Callable[[], Any]], device: str, seconds: float) -> dict[str, float]:
    """Seconds of the fastest call of each way, after one to warm up; ways take turns, so that all
    meet the same load.

    Args:
        seconds: to spend on each way; each is called twice at least.
    """
    for call in ways.values():
        call()
    wait(device)
    best, spent, calls = dict.fromkeys(ways, float("inf")), dict.fromkeys(ways, 0.0), 0
    while calls < 2 or any(value < seconds for value in spent.values()):
        for name, call in ways.items():
            if calls >= 2 and spent[name] >= seconds:
                continue
            started = time.perf_counter()
            call()
            wait(device)
            took = time.perf_counter() - started
            best[name], spent[name] = min(best[name], took), spent[name] + took
        calls += 1
    return best


class PeakMemory:
    """Bytes taken at most since it was made, beyond those taken then: of the card, or of the
    process.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            gc.collect()
            # what is free goes back: used again, it would not be seen
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
            # the peak starts anew; elsewhere it is that of the whole process
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self.before = resident()

    def __call__(self) -> int:
        """Bytes."""
        return max(
            0,
            (torch.cuda.max_memory_allocated() if self.cuda else resident(peak=True)) - self.before,
        )


def resident(peak: bool = False) -> int:
    """Bytes of the process that are in memory, now or at most."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        known = dict(line.split(":", 1) for line in lines)
        return int(known["VmHWM" if peak else "VmRSS"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class LiveTable:
    """A Markdown table that is printed line by line, and kept.

    Args:
        title, header: of the table.
        say: prints a line.
    """

    def __init__(self, title: str, header: Sequence[str], say: Say) -> None:
        self.title, self.header, self._say = title, tuple(header), say
        self.rows: list[tuple[str, ...]] = []
        rules = ["---", *["---:"] * (len(self.header) - 1)]
        for line in (f"\n{title}\n", self._line(self.header), self._line(rules)):
            say(line)

    def add(self, *cells: Any) -> None:
        """Prints and keeps a row."""
        self.rows.append(tuple(str(cell) for cell in cells))
        self._say(self._line(self.rows[-1]))

    @staticmethod
    def _line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"


def write(path: Path | None, device: str, tables: Sequence[LiveTable]) -> None:
    """Writes tables as JSON, if there is a path."""
    if path is not None:
        told = [
            {"title": table.title, "header": table.header, "rows": table.rows} for table in tables
        ]
        path.write_text(
            json.dumps({"machine": machine(device), "tables": told}, indent=1) + "\n",
            encoding="utf-8",
        )


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)
