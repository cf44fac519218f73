"""Latency of exported ensembles in ONNX Runtime: K = 5 modes against one; prints one table.

    python benchmarks/onnx_latency.py [--models mlp,cnn] [--threads 1] [--seconds 1] [--out FILE]

Each file takes inputs of one shape and returns only `mean` and `entropy`, as a service would ask
for. Set-ups take turns, and the table has the median time of each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedensemble.bench.timing import LiveTable, machine, say, write
from fedensemble.federation.named_models import build_model
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.predict import Ensemble

# Registered models at the sizes of the paper's data sets: options, shape of an input, tokens.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], bool]] = {
    "mlp": ({}, (1, 28, 28), False),
    "cnn": ({}, (1, 28, 28), False),
    "resnet20": ({}, (3, 32, 32), False),
    "lstm": ({}, (80,), True),
    "vit": ({}, (3, 32, 32), False),
}
MODES, BATCHES = (1, 5), (1, 256)


def main() -> None:
    """Measures all models and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="per model and batch size")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    options = parser.parse_args()
    say(machine("cpu"))
    columns = [f"{what}, batch {batch}" for batch in BATCHES for what in ("1 mode, ms", "ratio")]
    title = f"ONNX Runtime, {options.threads} thread: 5 modes against 1"
    table = LiveTable(title, ("model", "5 modes, MB", *columns), say)
    for name in options.models.split(","):
        table.add(*measure(name, options.threads, options.seconds))
    write(options.out, "cpu", [table])


def measure(name: str, threads: int, seconds: float) -> tuple[str, ...]:
    """A row of the table: size of the file, and per batch size a time and the ratio of K = 5."""
    import onnxruntime

    settings, shape, tokens = CASES[name]
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = threads
    session_options.inter_op_num_threads = 1
    sessions, size = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for modes in MODES:
            file = ensemble(name, settings, shape, tokens, modes).export(Path(folder) / "m.onnx")
            size = file.bytes
            sessions[modes] = onnxruntime.InferenceSession(
                file.path, session_options, providers=["CPUExecutionProvider"]
            )
    cells = [name, f"{size / 1e6:.2f}"]
    for batch in BATCHES:
        x = torch.randint(0, 50, (batch, *shape)) if tokens else torch.rand(batch, *shape)
        feed = {"x": x.numpy()}
        times = take_turns(
            {modes: run_once(session, feed) for modes, session in sessions.items()}, seconds
        )
        one, several = (statistics.median(times[modes]) for modes in MODES)
        cells += [f"{1000 * one:.3g}", f"{several / one:.1f}"]
    return tuple(cells)


def ensemble(
    name: str, settings: dict[str, Any], shape: tuple[int, ...], tokens: bool, modes: int
) -> Ensemble:
    """Untrained modes: the time does not depend on the values of parameters."""
    outputs = 80 if tokens else 10
    factory = build_model({"name": name, **settings}, {"shape": shape, "outputs": outputs})
    model = FunctionalModel(factory, "cross_entropy", torch.zeros(1, dtype=torch.int64))
    return Ensemble(model, *model.init_params(0, modes), input_shape=shape, tokens=tokens)


def run_once(session: Any, feed: dict[str, Any]) -> Callable[[], Any]:
    """A call of the session; a function of its own, so that it keeps its session."""
    return lambda: session.run(["mean", "entropy"], feed)


def take_turns(
    calls: dict[int, Callable[[], Any]], seconds: float, warm_up: int = 3
) -> dict[int, list[float]]:
    """Times of all calls, which take turns so that a change of the machine's load meets all."""
    for call in calls.values():
        for _ in range(warm_up):
            call()
    times: dict[int, list[float]] = {key: [] for key in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for key, call in calls.items():
            began = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
