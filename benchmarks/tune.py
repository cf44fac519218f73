"""Trials per hour of `fedensemble tune`: trials that train together, against one at a time.

    python benchmarks/tune.py --device cuda                 # on a GPU; takes about two minutes
    python benchmarks/tune.py [--config FILE] [--set rounds=100] [--trials 64] [--batches 1,4,16]

All searches try learning rates in new folders, with the same data in memory. What the sampler, the
tests and the files of the runs take is included. Each search gets an equal part of --seconds, and
stops at --trials. A short search with each batch size comes first and is not timed: it pays for
what is done once per process.

The default is a search as users run it: the default config with all of its rounds on a GPU, and
with 100 of them on a CPU. With few rounds, a trial takes little more than what is the same for
trials that train together and alone. The last column says how much that is: the time of a trial
with one round. In a batch only the rest is shared.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

import torch

from fedensemble.config.search_space import Range
from fedensemble.config.toml import Values, default_file, merge, read_toml, with_settings
from fedensemble.experiment.run import RunCallbacks
from fedensemble.experiment.studies.data_cache import DataCache
from fedensemble.experiment.studies.tune import make_search, tune
from fedensemble.runtime.hardware import processor


def measure(
    values: Values, trials: int, batch: int, limit: float, cache: DataCache
) -> tuple[int, float]:
    """Returns how many trials a search with batches of this size has trained, and the seconds.

    Args:
        trials: number of trials at most.
        limit: no batch begins after as many seconds.
        cache: of the data, which are read once per search, however long it is.
    """
    search = make_search(values, [Range("algorithm.lr", 0.01, 0.3, log=True)])
    with tempfile.TemporaryDirectory() as folder:
        started, done, seconds = time.perf_counter(), 0, 0.0
        # A search that is extended trains what it would have trained at once.
        while done < trials and seconds < limit:
            done = min(done + batch, trials)
            results = tune(
                search, Path(folder), done, batch, lambda *_: RunCallbacks(), lambda: None, cache
            )
            seconds = time.perf_counter() - started
    assert len(results) == done
    assert not any(trial.diverged for trial in results)
    return done, seconds


def main() -> None:
    """Measures all batch sizes, and prints a row of the table after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=default_file("digits.toml"))
    parser.add_argument("--set", action="append", default=[], help="override a setting")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trials", type=int, default=64, help="of each search, at most")
    parser.add_argument("--batches", default="1,4,16", help="trials that train together")
    parser.add_argument("--seconds", type=float, default=90, help="of all searches, about")
    options = parser.parse_args()
    settings = [*options.set, f"engine.device={options.device}"]
    values = read_toml(options.config)
    if not options.device.startswith("cuda"):
        values = merge(values, {"rounds": 100})
    values, cache = with_settings(values, settings), DataCache()
    batches = [int(text) for text in options.batches.split(",")]
    for batch in batches:  # a batch of each size
        measure({**values, "rounds": 2}, batch, batch, math.inf, cache)
    gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else ""
    rounds = values.get("rounds", "all")
    print(f"{options.config.stem}, {rounds} rounds, on {options.device} ({gpu or processor()})\n")
    print("| trials per batch | trials | seconds | trials per hour | ratio | ms, one round |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    first = 0.0
    for batch in batches:
        limit = options.seconds / len(batches)
        trials, seconds = measure(values, max(options.trials, batch), batch, limit, cache)
        few, fixed = measure({**values, "rounds": 1}, 16, batch, math.inf, cache)
        rate = 3600 * trials / seconds
        first = first or rate
        row = f"| {batch} | {trials} | {seconds:.1f} | {rate:,.0f} | {rate / first:.1f} |"
        print(f"{row} {1000 * fixed / few:.0f} |", flush=True)


if __name__ == "__main__":
    main()
