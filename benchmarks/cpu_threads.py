"""Engines and threads on a CPU, with the paper's CNN on 10 of 100 clients; prints one table.

    python benchmarks/cpu_threads.py [--threads 2] [--rounds 8]

Each client has 600 MNIST-shaped images, in batches of 32. The set-ups take turns, one round each.
The table has the fastest round of each set-up, without its first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from fedensemble.bench.throughput import CASES, federation
from fedensemble.bench.timing import LiveTable, machine, say, write
from fedensemble.engines.local import thread_pool
from fedensemble.runtime.malloc import keep_freed_memory


def main() -> None:
    """Measures all set-ups and prints the table."""
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    options = parser.parse_args()
    several, worth = options.threads, thread_pool._WORTH
    # Engine, number of threads, and the operations per visit from which the vector engine splits a
    # batch of visits over threads; infinity leaves the threads to torch.
    setups = {
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
    rounds, took = {}, {name: list[float]() for name in setups}
    for name, (engine, count, _) in setups.items():
        torch.set_num_threads(count)
        rounds[name] = federation(CASES["cnn-10-of-100"], engine, "cpu", {}).rounds(
            1 + options.rounds
        )
    for _ in range(1 + options.rounds):
        for name, (_, count, thread_pool._WORTH) in setups.items():
            torch.set_num_threads(count)
            start = time.perf_counter()
            next(rounds[name])
            took[name].append(time.perf_counter() - start)
    table = LiveTable(
        f"Ways to use several cores. {machine('cpu')}", ["way", "ms a round", "ratio"], say
    )
    for name, seconds in took.items():
        ratio = min(next(iter(took.values()))[1:]) / min(seconds[1:])
        table.add(name, f"{1e3 * min(seconds[1:]):,.0f}", f"{ratio:.1f}")
    write(options.out, "cpu", [table])


if __name__ == "__main__":
    main()
