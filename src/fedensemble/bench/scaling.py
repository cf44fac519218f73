"""How time and memory grow with clients, modes, visits, rounds, and with what clients remember."""

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
from .timing import LiveTable, PeakMemory, Say, machine, resident, say, wait, write

_MIB = 1 << 20
_ROUNDS = 3  # measured after one to warm up
_HEADER = ("what", "ms a round", "ratio", "data, MiB", "peak beyond data, MiB")


class Work:
    """The size of a client's work: small on a CPU, the paper's CNN on images on a GPU.

    Args:
        device: where it is done.
        scale: divides all counts, for a quick look.
    """

    def __init__(self, device: str, scale: int = 1) -> None:
        self.device, self.scale = device, scale
        self.images = device.startswith("cuda")
        self.examples = 20 if self.images else 5

    def data(self, clients: int) -> FederatedData:
        """Synthetic clients of equal size."""
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
        """A federation in which so many clients train a round."""
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

    def measure(self, *given: Any, **named: Any) -> tuple[float, float, float]:
        """Seconds of the fastest of some rounds, MiB of the data, and MiB taken at most beyond
        them.
        """
        peak = PeakMemory(self.device)
        federation = self.federation(*given, **named)
        list(federation.rounds(1))
        best = float("inf")
        for _ in range(_ROUNDS):
            wait(self.device)
            started = time.perf_counter()
            list(federation.rounds(1))
            wait(self.device)
            best = min(best, time.perf_counter() - started)
        size = (
            sum(
                tensor.numel() * tensor.element_size()
                for tensor in (federation.data.x, federation.data.y)
            )
            / _MIB
        )
        return best, size, max(0.0, peak() / _MIB - size)


def _rows(work: Work, table: LiveTable, cases: Sequence[tuple[str, dict[str, Any]]]) -> None:
    first = None
    for name, given in cases:
        best, size, beyond = work.measure(**given)
        first = first or best
        table.add(name, f"{1000 * best:.1f}", f"{best / first:.2f}", f"{size:.1f}", f"{beyond:.0f}")


def clients(work: Work, say: Say) -> LiveTable:
    """More clients in the population, as many a round."""
    visits = max(2, 100 // work.scale)
    counts = [visits * factor for factor in (1, 10, 100, 1000)]
    table = LiveTable(f"Clients, {visits} of them a round, FedAvg", _HEADER, say)
    _rows(
        work,
        table,
        [
            (f"{n:,} clients", {"clients": n, "modes": min(5, visits), "visits": visits})
            for n in counts
        ],
    )
    return table


def modes(work: Work, say: Say) -> LiveTable:
    """More modes, as many visits."""
    visits = max(2, 160 // work.scale)
    counts = sorted({max(1, k // work.scale) for k in (1, 5, 20, 80)})
    table = LiveTable(f"Modes, {visits} clients a round", _HEADER, say)
    given = {"clients": 2 * visits, "visits": visits}
    _rows(work, table, [(f"{k} mode{'s' if k > 1 else ''}", {**given, "modes": k}) for k in counts])
    return table


def visits(work: Work, say: Say) -> LiveTable:
    """More clients a round."""
    counts = sorted({max(2, m // work.scale) for m in (100, 1000, 10_000)})
    population = counts[-1]
    table = LiveTable(f"Clients a round, of {population:,}, 2 modes, FedAvg", _HEADER, say)
    _rows(
        work,
        table,
        [(f"{m:,} a round", {"clients": population, "modes": 2, "visits": m}) for m in counts],
    )
    return table


def memory(work: Work, say: Say) -> LiveTable:
    """What clients remember, in each place it can be."""
    count = max(2, 1000 // work.scale)
    table = LiveTable(
        f"Client memory (SCAFFOLD), {count} clients, all of them a round, 2 modes", _HEADER, say
    )
    given, stateful = (
        {"clients": count, "modes": 2, "visits": count},
        {"algorithm": Scaffold(lr=0.01)},
    )
    _rows(
        work,
        table,
        [("stateless (FedAvg)", given)]
        + [
            (f"on {place}", {**given, **stateful, "client_memory": place})
            for place in ("device", "host", "disk")
        ],
    )
    return table


def rounds(work: Work, say: Say) -> LiveTable:
    """Many rounds: neither time nor memory may grow."""
    count = max(20, 1000 // work.scale)
    table = LiveTable(
        f"{count} rounds, SCAFFOLD, 20 clients, all of them a round", ("what", "first", "last"), say
    )
    federation = work.federation(20, 2, 20, Scaffold(lr=0.001))
    tenth, seconds, taken = count // 10, [0.0] * count, []
    for index, _ in enumerate(_timed(federation, count, seconds, work.device)):
        if index + 1 in (tenth, count):
            gc.collect()
            taken.append(torch.cuda.memory_allocated() if work.images else resident())
    table.add(
        "ms a round, fastest",
        *(f"{1000 * min(part):.2f}" for part in (seconds[:tenth], seconds[-tenth:])),
    )
    table.add(
        f"memory after {tenth} and after {count} rounds, MiB",
        *(f"{value / _MIB:.1f}" for value in taken),
    )
    return table


def _timed(federation: Federation, count: int, seconds: list[float], device: str) -> Any:
    for index in range(count):
        started = time.perf_counter()
        yield from federation.rounds(1)
        wait(device)
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
    """Measures parts by name and prints a table of each."""
    for name in parts:
        if name not in PARTS:
            raise InputError(unknown("part", name, PARTS))
    say(f"Growth of time and memory. {machine(device)}")
    work = Work(device, scale)
    work.measure(10, 2, 10)  # libraries take their memory
    tables = [PARTS[name](work, say) for name in parts or PARTS]
    write(out, device, tables)
    return tables


def main(arguments: Sequence[str] | None = None) -> None:
    """The benchmark's own command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=int, default=1, help="divides all counts, for a quick look")
    parser.add_argument("--out", type=Path, help="write the tables as JSON, too")
    chosen = parser.parse_args(arguments)
    run(chosen.parts, chosen.device, chosen.scale, chosen.out)
