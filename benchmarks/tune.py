"""Trials per hour of `fedensemble tune`: trials that train together, against one at a time.

    python benchmarks/tune.py [--config FILE] [--device cpu] [--trials 16] [--batches 1,4,16]

All searches train the same number of trials of the learning rate in new folders, with the same data
in memory. What the sampler, the tests and the files of the runs take is included. A search of two
trials comes first and is not timed: it pays for what is done once per process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from fedensemble.config.search_space import Range
from fedensemble.config.toml import default_file, read_toml, with_settings
from fedensemble.experiment.run import RunCallbacks
from fedensemble.experiment.studies.tune import make_search, tune
from fedensemble.runtime.hardware import processor


def measure(values: dict[str, object], trials: int, batch: int) -> float:
    """Returns the seconds that a search with batches of this size takes."""
    search = make_search(values, [Range("algorithm.lr", 0.01, 0.3, log=True)])
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        results = tune(search, Path(folder), trials, batch, lambda *_: RunCallbacks(), lambda: None)
        seconds = time.perf_counter() - started
    assert len(results) == trials
    assert not any(trial.diverged for trial in results)
    return seconds


def main() -> None:
    """Measures all batch sizes and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=default_file("digits.toml"))
    parser.add_argument("--set", action="append", default=[], help="override a setting")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--batches", default="1,4,16")
    options = parser.parse_args()
    settings = [*options.set, f"engine.device={options.device}"]
    values = with_settings(read_toml(options.config), settings)
    batches = [int(text) for text in options.batches.split(",")]
    measure(values, min(2, options.trials), batches[0])
    seconds = {batch: measure(values, options.trials, batch) for batch in batches}
    print(f"{options.trials} trials, {options.device} ({processor()})\n")
    print("| trials per batch | seconds | trials per hour | ratio |\n| ---: | ---: | ---: | ---: |")
    for batch, taken in seconds.items():
        ratio = seconds[batches[0]] / taken
        print(f"| {batch} | {taken:.1f} | {3600 * options.trials / taken:,.0f} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
