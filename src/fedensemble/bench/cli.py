"""`fedensemble bench`: the benchmarks by name, small by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import InputError, unknown
from . import scaling, throughput
from .timing import Say

Bench = Callable[[str, float, bool, Path | None, Say], None]


def _engines(device: str, seconds: float, full: bool, out: Path | None, say: Say) -> None:
    throughput.run(list(throughput.CASES) if full else (), device, seconds, out=out, say=say)


def _growth(device: str, seconds: float, full: bool, out: Path | None, say: Say) -> None:
    scaling.run((), device, 1 if full else 10, out, say)


BENCHMARKS: dict[str, Bench] = {"engines": _engines, "growth": _growth}


def bench(
    name: str | None, device: str, seconds: float, full: bool, folder: Path | None, say: Say
) -> None:
    """Runs one benchmark by name, or all of them if `name` is None.

    Args:
        seconds: time to spend on each implementation that is measured.
        full: run all cases at full size; this needs a GPU.
        folder: if given, each table is also written to a JSON file in it.
    """
    if name is not None and name not in BENCHMARKS:
        raise InputError(unknown("benchmark", name, BENCHMARKS))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for benchmark in [name] if name is not None else BENCHMARKS:
        BENCHMARKS[benchmark](
            device, seconds, full, None if folder is None else folder / f"{benchmark}.json", say
        )
