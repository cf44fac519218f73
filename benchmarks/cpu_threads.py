"""Engines and threads on a CPU: the paper's CNN, 10 of 100 clients × 600 MNIST-shaped images, batch
32; one table.

    python benchmarks/cpu_threads.py [--threads 2] [--rounds 8]

Ways take turns, a round each; the table has the fastest round of each, the first left out.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from fedensemble.bench.throughput import CASES, federation
from fedensemble.bench.timing import LiveTable, machine, say, write
from fedensemble.engines.local import thread_pool


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="write the table as JSON, too")
    options = parser.parse_args()
    several, worth = options.threads, thread_pool._WORTH
    ways = {  # engine, threads, and from how many operations of a visit shares are worth a thread
        "engine loop, one thread": ("loop", 1, worth),
        f"engine loop, {several} threads": ("loop", several, worth),
        "batched, one thread": ("vector", 1, worth),
        f"batched, torch's own {several} threads inside each operation": (
            "vector",
            several,
            float("inf"),
        ),
        f"batched, {several} shares in a thread each": ("vector", several, worth),
    }
    rounds, took = {}, {way: list[float]() for way in ways}
    for way, (engine, count, _) in ways.items():
        torch.set_num_threads(count)
        rounds[way] = federation(CASES["cnn-10-of-100"], engine, "cpu", {}).rounds(
            1 + options.rounds
        )
    for _ in range(1 + options.rounds):
        for way, (_, count, thread_pool._WORTH) in ways.items():
            torch.set_num_threads(count)
            start = time.perf_counter()
            next(rounds[way])
            took[way].append(time.perf_counter() - start)
    table = LiveTable(
        f"Ways to use several cores. {machine('cpu')}", ["way", "ms a round", "ratio"], say
    )
    for way, seconds in took.items():
        ratio = min(next(iter(took.values()))[1:]) / min(seconds[1:])
        table.add(way, f"{1e3 * min(seconds[1:]):,.0f}", f"{ratio:.1f}")
    write(options.out, "cpu", [table])


if __name__ == "__main__":
    main()
