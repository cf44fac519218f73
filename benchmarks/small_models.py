"""Many runs of a model with 100 weights, one by one and as one batch; prints one table.

    python benchmarks/small_models.py [--runs 48] [--rounds 10] [--turns 3] [--device cpu]

The runs are those of the paper's Table 1: seeds and numbers of modes of the toy regression, 20 of
50 clients per round. Such runs spend their time in Python and not in arithmetic, so the table also
has the number of function calls, which no other program on the machine can disturb. On a CPU the
time is that of the process, for the same reason.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from pathlib import Path

from fedensemble.bench.timing import LiveTable, machine, say, synchronize, write
from fedensemble.config.build import build_federation
from fedensemble.experiment.studies.data_cache import DataCache
from fedensemble.experiment.studies.paper_table import find_paper_table, read_reproduction
from fedensemble.experiment.studies.run_groups import Groups
from fedensemble.federation.federation import Federation


def main() -> None:
    """Measures both ways and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    options = parser.parse_args()
    seeds = range(-(-options.runs // 5))  # of each of the five numbers of modes
    reproduction = read_reproduction(
        find_paper_table("table1"), seeds=list(seeds), device=options.device
    )
    configs = [config for cell in reproduction.cells for config in cell.configs][: options.runs]
    cache, took, calls = DataCache(), dict[str, list[float]](), dict[str, float]()
    runs = {
        name: [build_federation(config, cache.build_data(config)) for config in configs]
        for name in WAYS
    }
    clock = time.perf_counter if options.device.startswith("cuda") else time.process_time
    for turn in range(1 + options.turns):
        for name, advance in WAYS.items():
            started = clock()
            advance(runs[name], options.rounds)
            synchronize(options.device)
            if turn:  # the first is the warm-up
                took.setdefault(name, []).append(clock() - started)
    for name, advance in WAYS.items():
        with cProfile.Profile() as profile:
            advance(runs[name], 2)
        calls[name] = pstats.Stats(profile).total_calls / 2 / len(configs)  # type: ignore[attr-defined]
    table = LiveTable(
        f"{len(configs)} runs of 100 weights. {machine(options.device)}",
        ["way", "ms per run and round", "function calls per run and round", "ratio"],
        say,
    )
    for name, seconds in took.items():
        share = 1e3 * min(seconds) / options.rounds / len(configs)
        ratio = min(next(iter(took.values()))) / min(seconds)
        table.add(name, f"{share:.3f}", f"{calls[name]:,.0f}", f"{ratio:.1f}")
    write(options.out, options.device, [table])


def advance_alone(runs: list[Federation], rounds: int) -> None:
    """Trains the rounds of one run after another."""
    for run in runs:
        run.train(rounds)


def advance_together(runs: list[Federation], rounds: int) -> None:
    """Trains each round of all runs as one batch."""
    groups, waiting = Groups(), dict(enumerate(runs))
    for _ in range(rounds):
        groups.advance(waiting)


WAYS = {"one by one": advance_alone, "one batch": advance_together}

if __name__ == "__main__":
    main()
