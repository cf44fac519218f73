"""Carries out one run: resumes it, trains, evaluates, checkpoints, and sums it up."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import write_json
from ..core.algorithm import algorithms
from ..core.types import RoundReport
from ..data import FederatedData
from ..errors import StoreError
from ..federation import Federation
from ..metrics import evaluate
from ..version import VERSION
from .build import build_data, build_federation, model_facts
from .config import Config
from .interruption import interruptible
from .modes import write_modes
from .store import RunFolder, Say

CHECKPOINT_SECONDS = 10.0


@dataclass
class Watcher:
    """What a run tells whoever watches; the defaults stay silent."""

    say: Say = lambda text: None
    started: Callable[[Config, int], None] = lambda config, round: None
    advanced: Callable[[RoundReport, dict[str, float]], None] = lambda report, metrics: None


def run(
    config: Config, folder: Path, watcher: Watcher | None = None, *, checkpoint_seconds: float = CHECKPOINT_SECONDS
) -> dict[str, Any]:
    """The summary of a run: read if it is finished, continued if it was interrupted, trained if it is new.

    Args:
        config: with its device resolved.
        checkpoint_seconds: least time between two checkpoints; how often they are taken never changes a result.
    """
    watcher = watcher or Watcher()
    store = RunFolder(folder)
    store.claim(config)
    try:
        if store.done:
            return _unchanged(config, store)
        data = build_data(config)
        federation = build_federation(config, data)
        facts = {"data": fingerprint(data)}
        found = store.resume(facts, watcher.say)
        if found is not None:
            federation.restore(*found)
            watcher.say(f"Continuing {folder} after round {federation.round}.")
        told = remarks(federation)
        for sentence in told:
            watcher.say(sentence)
        write_json(folder / "env.json", environment(config))
        watcher.started(config, federation.round)
        started = time.monotonic()
        _train(config, store, federation, data, facts, watcher, checkpoint_seconds)
        seconds = time.monotonic() - started
        for sentence in (new for new in remarks(federation) if new not in told):
            watcher.say(sentence)
        write_modes(store.modes_file, federation.ensemble, {"model": model_facts(data, config.training.loss)})
        store.finish({**_sum_up(config, store, federation, seconds), **facts})
        return store.summary()
    finally:
        store.release()


def _unchanged(config: Config, store: RunFolder) -> dict[str, Any]:
    """The summary of a finished run; raises if it was trained on a file of the user's that has changed since."""
    summary = store.summary()
    if config.data["source"] == "npz" and fingerprint(build_data(config)) != summary.get("data"):
        raise StoreError(
            f"{config.data['path']} has changed since {store.path} was trained on it. Choose another --out."
        )
    return summary


def _train(
    config: Config, store: RunFolder, federation: Federation, data: FederatedData, facts: dict[str, Any],
    watcher: Watcher, checkpoint_seconds: float,
) -> None:  # fmt: skip
    """Trains the rounds that are left; a Ctrl-C ends it after the round, with that round on disk."""
    saved_at = time.monotonic()
    latest: dict[str, float] = {}
    with interruptible(watcher.say) as interruption:
        for report in federation.rounds(config.rounds - federation.round):
            record = describe(report)
            if report.round % config.evaluation.every == 0 or report.round == config.rounds:
                tested = test(config, federation, data)
                record |= tested
                latest = tested.get("test", {})
            store.append_metrics(record)
            watcher.advanced(report, latest)
            due = time.monotonic() - saved_at >= checkpoint_seconds
            if due or report.round == config.rounds or interruption.asked:
                store.save(federation.tensors(), federation.round, facts)
                saved_at = time.monotonic()
            if interruption.asked:
                raise KeyboardInterrupt


def remarks(federation: Federation) -> list[str]:
    """What a user should know of a run: an assumption of the method that does not hold, and the engine's notes."""
    algorithm, schedule, clients = federation.algorithm, federation.schedule, len(federation.data)
    said = list(federation.engine.notes)
    if algorithm.full_participation and schedule.clients_per_round < clients:
        name = algorithms.name_of(type(algorithm)) or type(algorithm).__name__
        said.insert(
            0,
            f"{name} assumes that all clients take part in every round: with {schedule.clients_per_round} of "
            f"{clients}, the server goes by those who report, and the others keep what they remember.",
        )
    return said


def describe(report: RoundReport) -> dict[str, Any]:
    """A round as a record; without times, so that the same run gives the same bytes."""
    return {
        "round": report.round,
        "age": report.age,
        "loss": report.loss,
        "visits": len(report.plan.client),
        "modes_trained": len(report.trained),
        "bytes_up": report.bytes_up,
        "bytes_down": report.bytes_down,
    }


def test(config: Config, federation: Federation, data: FederatedData) -> dict[str, Any]:
    """Metrics on the test set, by the way of testing; empty without a test set."""
    if data.x_test is None or data.y_test is None:
        return {}
    ways = {"test": False, "test_dropout": True} if config.evaluation.dropout else {"test": False}
    ensemble, size = federation.ensemble, config.evaluation.batch_size
    return {
        name: evaluate(ensemble.predict(data.x_test, batch_size=size, dropout=dropout), data.y_test)
        for name, dropout in ways.items()
    }


def fingerprint(data: FederatedData) -> str:
    """A hash of what is trained on, so that a run never continues on other data."""
    digest = sha256()
    for tensor in (data.x, data.y, data.size, data.x_test, data.y_test):
        if tensor is None:
            continue
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def environment(config: Config) -> dict[str, Any]:
    """What the run is carried out with."""
    cuda = torch.cuda.is_available() and config.engine.device.startswith("cuda")
    return {
        "fedensemble": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "command": sys.argv[1:],
    }


def _sum_up(config: Config, store: RunFolder, federation: Federation, seconds: float) -> dict[str, Any]:
    records = store.metrics()
    return {
        "name": config.name,
        "hash": config.hash(),
        "rounds": federation.round,
        "modes": federation.schedule.modes,
        "parameters": federation.learner.theta_layout.total,
        "task": federation.learner.task,
        "bytes_up": sum(record["bytes_up"] for record in records),
        "bytes_down": sum(record["bytes_down"] for record in records),
        "seconds": round(seconds, 3),
        "combine": federation.ensemble.combine,
        **{key: value for key, value in records[-1].items() if key.startswith("test")},
    }
