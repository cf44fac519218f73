"""Trials per hour of `fedensemble tune`: trials that train together, against one at a time.

    python benchmarks/tune.py --device cuda                 # on a GPU; takes about two minutes
    python benchmarks/tune.py [--config FILE] [--set rounds=100] [--trials 64] [--batches 1,16,64]

What is timed is the command in a warm process, from reading the config to the printed table. All
searches train the same trials for the same rounds: the sampler proposes as always, and what it
proposes is replaced by the next of a list of learning rates. A short search with each batch size
comes first and is not timed: it pays for what is done once per process, such as compiling kernels,
so that one trial at a time does not pay for it either. A trial at a time trains with all that the
engine has for a single run, such as CUDA graphs.

The second table says where the time of a trial goes: making the config and the federation, the
sampler, training, the test, and the files. On a GPU, training includes waiting for it.

The default is a search as users run it: the default config with all of its rounds on a GPU, and
with 100 of them on a CPU.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fedensemble import durable
from fedensemble.cli.commands.tune import tune_settings
from fedensemble.config.toml import default_file, read_toml, with_settings
from fedensemble.experiment import run
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.experiment.studies import multi_run, tune
from fedensemble.runtime.hardware import processor

LR = "algorithm.lr"
LOW, HIGH = 0.01, 0.3  # no trial diverges, so that all train for all rounds
PARTS: dict[str, list[tuple[Any, str]]] = {
    "build": [(run, "assemble"), (run, "untrained_loss"), (tune.Search, "config")],
    "propose": [(tune, "propose")],
    "train": [(multi_run.Groups, "advance")],
    "evaluate": [(run, "evaluate_run")],
    "store": [
        (durable, "sync_now"),
        (run, "write_modes"),
        (tune, "_write"),
        *((RunFolder, name) for name in ("claim", "resume", "write", "append_metrics")),
        *((RunFolder, name) for name in ("metrics", "save", "finish", "summary", "release")),
    ],
}


class Clock:
    """Seconds spent in each part of the command; time in a part inside another counts once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running, self._since = ["other"], time.perf_counter()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, whose time counts as that of a part."""

        @wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            self._charge()
            self._running.append(part)
            try:
                return function(*args, **options)
            finally:
                self._charge()
                self._running.pop()

        return wrapper

    @contextmanager
    def running(self) -> Iterator[None]:
        """Times all parts of a command."""
        with ExitStack() as stack:
            for part, functions in PARTS.items():
                for owner, name in functions:
                    timed = self.timed(part, getattr(owner, name))
                    stack.enter_context(patch.object(owner, name, timed))
            self._since = time.perf_counter()
            yield
            self._charge()


@contextmanager
def fixed_trials(rates: Sequence[float]) -> Iterator[None]:
    """Replaces what the sampler proposes by the next of these learning rates."""
    original = tune.propose

    def propose(spaces: Any, results: Sequence[Any], count: int, *rest: Any) -> Any:
        asked = original(spaces, results, count, *rest)
        assert len(asked) == count
        return [{LR: f"{rate:.6g}"} for rate in rates[len(results) : len(results) + count]]

    with patch.object(tune, "propose", propose):
        yield


def search(
    config: Path, fixed: Mapping[str, str], rates: Sequence[float], batch: int
) -> tuple[float, Clock]:
    """Runs the command with these trials; returns its seconds, and the seconds of its parts."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, fixed_trials(rates):
        started = time.perf_counter()
        with clock.running(), redirect_stdout(io.StringIO()):
            runs = Path(folder)
            searched = {**fixed, LR: f"log:{LOW}..{HIGH}"}
            settings = [f"{key}={text}" for key, text in searched.items()]
            tune_settings(config, settings, len(rates), batch, None, None, runs)
        seconds = time.perf_counter() - started
        done = [trial for file in runs.rglob(tune.RECORD) for trial in tune.read_trials(file)]
        assert len(done) == len(rates)
        assert all(trial.values for trial in done)
    return seconds, clock


def main() -> None:
    """Measures all batch sizes, and prints a row of each table per batch size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=default_file("digits.toml"))
    parser.add_argument("--set", action="append", default=[], help="override a setting")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trials", type=int, default=64, help="of each search")
    parser.add_argument("--batches", default="1,16,64", help="trials that train together")
    parser.add_argument(
        "--seconds", type=float, default=80, help="of a search; if it takes longer, fewer trials"
    )
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda")
    fixed = {} if on_gpu else {"rounds": "100"}
    fixed |= dict(text.split("=", 1) for text in options.set)
    fixed["engine.device"] = options.device
    rates = np.geomspace(LOW, HIGH, options.trials).tolist()
    np.random.default_rng(0).shuffle(rates)
    batches = [int(text) for text in options.batches.split(",")]
    warm_up = {}
    for batch in batches:
        few = fixed if batch == 1 else {**fixed, "rounds": "3"}
        for _ in range(2):  # the second time is that of a warm process
            warm_up[batch] = search(options.config, few, rates[:batch], batch)[0]
    settings = [f"{key}={text}" for key, text in fixed.items()]
    values = with_settings(read_toml(options.config), settings)
    gpu = torch.cuda.get_device_name() if on_gpu else ""
    rounds = values.get("rounds", "all")
    print(f"{options.config.stem}, {rounds} rounds, on {options.device} ({gpu or processor()})\n")
    print("| trials per batch | trials | seconds | trials per hour | ratio |")
    print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
    first, parts = 0.0, []
    for batch in batches:
        count = len(rates)
        if batch == 1:
            count = max(2, min(count, int(options.seconds / warm_up[batch])))
        seconds, clock = search(options.config, fixed, rates[:count], batch)
        rate = 3600 * count / seconds
        first = first or rate
        print(
            f"| {batch} | {count} | {seconds:.1f} | {rate:,.0f} | {rate / first:.1f} |", flush=True
        )
        parts.append((batch, [1000 * clock.seconds[part] / count for part in (*PARTS, "other")]))
    print("\nMilliseconds per trial:\n")
    print(f"| trials per batch | {' | '.join((*PARTS, 'other'))} |")
    print(f"|{' ---: |' * (len(PARTS) + 2)}")
    for batch, milliseconds in parts:
        print(f"| {batch} | {' | '.join(f'{each:.1f}' for each in milliseconds)} |")


if __name__ == "__main__":
    main()
