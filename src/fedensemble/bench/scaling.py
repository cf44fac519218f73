"""How time and memory grow with clients, modes, visits, rounds and client state."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..algorithms import FedAvg, Scaffold
from ..core.algorithm import Algorithm
from ..data import FederatedData
from ..errors import InputError, unknown
from ..federation.federation import Federation
from ..models import models
from .timing import LiveTable, PeakMemory, Say, machine, resident_bytes, say, synchronize, write

_MIB = 1 << 20
_ROUNDS = 3  # measured rounds, after one round of warm-up
_HEADER = ("what", "ms a round", "ratio", "data, MiB", "peak beyond data, MiB")


class Work:
    """The workload of a client: a small MLP on a CPU, the paper's CNN on images on a GPU.

    Args:
        device: where clients train.
        scale: divides all counts, for a quick run.
    """

    def __init__(self, device: str, scale: int = 1) -> None:
        self.device, self.scale = device, scale
        self.images = device.startswith("cuda")
        self.examples = 20 if self.images else 5

    def data(self, clients: int) -> FederatedData:
        """Synthetic data of clients of equal size."""
        generator = torch.Generator().manual_seed(0)
        count = clients * self.examples
        if self.images:
            x = torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
        else:
            x = torch.randn(count, 32, generator=generator)
        y = torch.randint(0, 10, (count,), generator=generator)
        return FederatedData.from_arrays(x, y, [self.examples] * clients, classes=10)

    def federation(
        self,
        clients: int,
        modes: int,
        visits: int,
        algorithm: Algorithm | None = None,
        **options: Any,
    ) -> Federation:
        """A federation of `clients` clients with `visits` visits per round."""
        data = self.data(clients)
        name, shape = ("cnn", (1, 28, 28)) if self.images else ("mlp", (32,))
        return Federation(
            lambda: models[name](shape=shape, outputs=10),
            data,
            algorithm or FedAvg(lr=0.01),
            modes=modes,
            clients_per_round=visits,
            batch_size=self.examples,
            device=self.device,
            engine_options=options,
        )

    def measure(self, *args: Any, **kwargs: Any) -> tuple[float, float, float]:
        """Seconds of the fastest round, MiB of the data, and peak MiB beyond the data."""
        peak = PeakMemory(self.device)
        federation = self.federation(*args, **kwargs)
        list(federation.rounds(1))
        best = float("inf")
        for _ in range(_ROUNDS):
            synchronize(self.device)
            started = time.perf_counter()
            list(federation.rounds(1))
            synchronize(self.device)
            best = min(best, time.perf_counter() - started)
        size = (
            sum(
                tensor.numel() * tensor.element_size()
                for tensor in (federation.data.x, federation.data.y)
            )
            / _MIB
        )
        return best, size, max(0.0, peak() / _MIB - size)


def _add_rows(work: Work, table: LiveTable, cases: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Measures each case and adds its row; ratios are to the first case."""
    first = None
    for name, settings in cases:
        best, size, beyond = work.measure(**settings)
        first = first or best
        table.add(name, f"{1000 * best:.1f}", f"{best / first:.2f}", f"{size:.1f}", f"{beyond:.0f}")


def clients(work: Work, say: Say) -> LiveTable:
    """Measures growing populations with the same number of clients per round."""
    visits = max(2, 100 // work.scale)
    counts = [visits * factor for factor in (1, 10, 100, 1000)]
    table = LiveTable(f"Clients, {visits} of them per round, FedAvg", _HEADER, say)
    _add_rows(
        work,
        table,
        [
            (f"{n:,} clients", {"clients": n, "modes": min(5, visits), "visits": visits})
            for n in counts
        ],
    )
    return table


def modes(work: Work, say: Say) -> LiveTable:
    """Measures growing numbers of modes with the same number of visits."""
    visits = max(2, 160 // work.scale)
    counts = sorted({max(1, k // work.scale) for k in (1, 5, 20, 80)})
    table = LiveTable(f"Modes, {visits} clients per round", _HEADER, say)
    fixed = {"clients": 2 * visits, "visits": visits}
    cases = [(f"{k} mode{'s' if k > 1 else ''}", {**fixed, "modes": k}) for k in counts]
    _add_rows(work, table, cases)
    return table


def visits(work: Work, say: Say) -> LiveTable:
    """Measures growing numbers of clients per round."""
    counts = sorted({max(2, m // work.scale) for m in (100, 1000, 10_000)})
    population = counts[-1]
    table = LiveTable(f"Clients per round, of {population:,}, 2 modes, FedAvg", _HEADER, say)
    _add_rows(
        work,
        table,
        [(f"{m:,} per round", {"clients": population, "modes": 2, "visits": m}) for m in counts],
    )
    return table


def memory(work: Work, say: Say) -> LiveTable:
    """Measures client state in each place where it can be stored."""
    count = max(2, 1000 // work.scale)
    table = LiveTable(
        f"Client state (SCAFFOLD), {count} clients, all of them per round, 2 modes", _HEADER, say
    )
    fixed = {"clients": count, "modes": 2, "visits": count}
    stateful = {**fixed, "algorithm": Scaffold(lr=0.01)}
    _add_rows(
        work,
        table,
        [("stateless (FedAvg)", fixed)]
        + [
            (f"on {place}", {**stateful, "client_memory": place})
            for place in ("device", "host", "disk")
        ],
    )
    return table


def rounds(work: Work, say: Say) -> LiveTable:
    """Measures the first and the last of many rounds: neither time nor memory may grow."""
    count = max(20, 1000 // work.scale)
    table = LiveTable(
        f"{count} rounds, SCAFFOLD, 20 clients, all of them per round",
        ("what", "first", "last"),
        say,
    )
    federation = work.federation(20, 2, 20, Scaffold(lr=0.001))
    tenth, seconds, used_bytes = count // 10, [0.0] * count, []
    for index, _ in enumerate(_time_rounds(federation, count, seconds, work.device)):
        if index + 1 in (tenth, count):
            gc.collect()
            used_bytes.append(torch.cuda.memory_allocated() if work.images else resident_bytes())
    table.add(
        "ms per round, fastest",
        *(f"{1000 * min(part):.2f}" for part in (seconds[:tenth], seconds[-tenth:])),
    )
    table.add(
        f"memory after {tenth} and after {count} rounds, MiB",
        *(f"{value / _MIB:.1f}" for value in used_bytes),
    )
    return table


def _time_rounds(federation: Federation, count: int, seconds: list[float], device: str) -> Any:
    """Yields the reports of `count` rounds and writes the time of each round into `seconds`."""
    for index in range(count):
        started = time.perf_counter()
        yield from federation.rounds(1)
        synchronize(device)
        seconds[index] = time.perf_counter() - started


PARTS: dict[str, Callable[[Work, Say], LiveTable]] = {
    "clients": clients,
    "modes": modes,
    "visits": visits,
    "memory": memory,
    "rounds": rounds,
}


def run(
    parts: Sequence[str] = (),
    device: str = "cpu",
    scale: int = 1,
    out: Path | None = None,
    say: Say = say,
) -> list[LiveTable]:
    """Measures the parts named, or all of them, and prints one table per part."""
    for name in parts:
        if name not in PARTS:
            raise InputError(unknown("part", name, PARTS))
    say(f"Growth of time and memory. {machine(device)}")
    work = Work(device, scale)
    work.measure(10, 2, 10)  # warm-up: libraries allocate their memory here
    tables = [PARTS[name](work, say) for name in parts or PARTS]
    write(out, device, tables)
    return tables


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=int, default=1, help="divides all counts, for a quick run")
    parser.add_argument("--out", type=Path, help="also write the tables as JSON")
    options = parser.parse_args(arguments)
    run(options.parts, options.device, options.scale, options.out)
