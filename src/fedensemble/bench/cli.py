"""`fedensemble bench`: the benchmarks by name, small by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import InputError, unknown
from . import model_speed, scaling, throughput
from .timing import Say

Bench = Callable[[str, float, bool, Path | None, Say], None]


def _engines(device: str, seconds: float, full: bool, out: Path | None, say: Say) -> None:
    throughput.run(list(throughput.CASES) if full else (), device, seconds, out=out, say=say)


def _growth(device: str, seconds: float, full: bool, out: Path | None, say: Say) -> None:
    scaling.run((), device, 1 if full else 10, out, say)


_CPU_CLIENTS = 4  # of benchmark `models`

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
        raise InputError(unknown("benchmark", name, (*BENCHMARKS, "models")))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for benchmark in [name] if name is not None else BENCHMARKS:
        BENCHMARKS[benchmark](
            device, seconds, full, None if folder is None else folder / f"{benchmark}.json", say
        )


def bench_models(
    name: str | None,
    networks: str | None,
    clients: int | None,
    batch: int | None,
    device: str,
    seconds: float,
    folder: Path | None,
    say: Say,
) -> None:
    """Runs the benchmark `models`.

    Args:
        name: of the benchmark that was asked for, if one was.
        networks: names separated by commas, "all", or None for those that suit the device.
        clients, batch: of a round; None is 50 (4 on a CPU) and 16.
        seconds, folder: as for `bench`.
    """
    if name not in (None, "models"):
        raise InputError(f"--models belongs to benchmark 'models'; got '{name}'. Leave it out.")
    given = [] if networks is None else [part.strip() for part in networks.split(",")]
    chosen = list(model_speed.CASES) if given == ["all"] else [part for part in given if part]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    usual = model_speed.Size()
    count = usual.clients if device.startswith("cuda") else _CPU_CLIENTS
    size = model_speed.Size(clients or count, batch or usual.batch)
    out = None if folder is None else folder / "models.json"
    model_speed.run(chosen, device, seconds, size, out=out, say=say)
