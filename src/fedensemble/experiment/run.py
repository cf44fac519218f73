"""Carries out one run: resumes it, trains, evaluates, checkpoints, and sums it up."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import write_json
from ..core.algorithm import algorithms
from ..core.types import RoundReport
from ..data import FederatedData
from ..engines.ranks import Ranks
from ..errors import RankError, StoreError
from ..federation import Federation
from ..metrics import evaluate, evaluate_modes
from ..predict import Prediction
from ..version import VERSION
from .assemble import Read, assemble, end_round, fingerprint, meet, resume
from .build import build_data, model_facts
from .config import Config
from .interruption import Interruption, interruptible
from .modes import write_modes
from .predictions import describe_clients, describe_predictions, write_compact
from .store import RunFolder, Say
from .track import Tracker, catch_up, check_installed, tracking

CHECKPOINT_SECONDS = 10.0
_ON_DEVICE = 100_000_000  # numbers of a prediction that are judged where they are
Work = Generator[Federation, RoundReport, dict[str, Any]]  # a run that asks for rounds and ends with its summary


@dataclass
class Watcher:
    """What a run tells whoever watches; the defaults stay silent."""

    say: Say = lambda text: None
    started: Callable[[Config, int], None] = lambda config, round: None
    advanced: Callable[[RoundReport, dict[str, float]], None] = lambda report, metrics: None


def run(
    config: Config, folder: Path, watcher: Watcher | None = None, *, checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ranks: Ranks | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The summary of a run: read if it is finished, continued if it was interrupted, trained if it is new.

    Args:
        config: with its device resolved.
        checkpoint_seconds: least time between two checkpoints; how often they are taken never changes a result.
        ranks: the job whose rank 0 this is; the others `follow`.
    """
    watcher = watcher or Watcher()
    with interruptible(watcher.say) as interruption:
        work = carry_out(config, folder, watcher, interruption, checkpoint_seconds, ranks)
        try:
            federation = next(work)
            while True:
                try:
                    report = next(federation.rounds(1))
                except BaseException as error:  # the run must know, to let go of its folder
                    work.throw(error)
                federation = work.send(report)
        except StopIteration as end:
            return dict(end.value)


def carry_out(
    config: Config, folder: Path, watcher: Watcher, interruption: Interruption,
    checkpoint_seconds: float = CHECKPOINT_SECONDS, ranks: Ranks | None = None, read: Read = build_data,
) -> Work:  # fmt: skip
    """A run as a generator: it gives its federation whenever it wants a round trained, and is sent the report."""
    store, ranks = RunFolder(folder), ranks or Ranks()
    store.claim(config)
    try:
        if meet(config, ranks, store.done):
            summary = _unchanged(config, store, read)
            catch_up(config.track, folder, config.values(), store.metrics())
            return summary
        check_installed(config.track)
        data, federation, facts = assemble(config, ranks, read)
        if resume(federation, store.resume(facts, watcher.say), ranks):
            watcher.say(f"Continuing {folder} after round {federation.round}.")
        told = remarks(federation)
        for sentence in told:
            watcher.say(sentence)
        facts_of_engine = {"precision": federation.engine.precision, "ranks": ranks.size}
        write_json(folder / "env.json", {**environment(config), **facts_of_engine})
        write_compact(store.clients_file, describe_clients(data))
        watcher.started(config, federation.round)
        with tracking(config.track, folder, config.values(), store.metrics()) as trackers:
            prediction = yield from _train(
                config, store, federation, data, facts, watcher, interruption, checkpoint_seconds, trackers, ranks
            )
        for sentence in (new for new in remarks(federation) if new not in told):
            watcher.say(sentence)
        write_modes(store.modes_file, federation.ensemble, {"model": model_facts(data, config.training.loss)})
        _keep_predictions(config, store, federation, data, prediction)
        store.finish({**_sum_up(config, store, federation), **facts})
        return store.summary()
    except RankError as error:
        raise RankError(f"{error} {store.kept()}") from None
    finally:
        store.release()


def _unchanged(config: Config, store: RunFolder, read: Read) -> dict[str, Any]:
    """The summary of a finished run; raises if it was trained on a file of the user's that has changed since."""
    summary = store.summary()
    store.check_modes()
    if config.data["source"] == "npz" and fingerprint(read(config)) != summary.get("data"):
        raise StoreError(
            f"{config.data['path']} has changed since {store.path} was trained on it. Choose another --out."
        )
    return summary


def _train(
    config: Config, store: RunFolder, federation: Federation, data: FederatedData, facts: dict[str, Any],
    watcher: Watcher, interruption: Interruption, checkpoint_seconds: float, trackers: Sequence[Tracker],
    ranks: Ranks,
) -> Generator[Federation, RoundReport, Prediction | None]:  # fmt: skip
    """Asks for the rounds that are left, and ends with what is predicted after them, where that is known.

    A Ctrl-C ends it after the round, with that round on disk.
    """
    saved_at = time.monotonic()
    prediction: Prediction | None = None
    latest: dict[str, float] = {}
    while federation.round < config.rounds:
        report = yield federation
        record = describe(report)
        if report.round % config.evaluation.every == 0 or report.round == config.rounds:
            tested, found = test(config, federation, data)
            prediction = found if report.round == config.rounds else None
            record |= tested
            latest = tested.get("test", {})
        store.append_metrics(record)
        for tracker in trackers:
            tracker.record(record)
        watcher.advanced(report, latest)
        due = time.monotonic() - saved_at >= checkpoint_seconds
        save, stop = end_round(ranks, interruption.asked, due or report.round == config.rounds)
        if save:
            store.save(federation.tensors(), federation.round, facts)
            saved_at = time.monotonic()
        if stop:
            raise KeyboardInterrupt
    return prediction


def _keep_predictions(
    config: Config, store: RunFolder, federation: Federation, data: FederatedData, prediction: Prediction | None
) -> None:
    """Writes what the report shows of the predictions for the test set, so that it needs no data and no model."""
    if data.x_test is not None and data.y_test is not None:
        found = prediction or _predict(config, federation, data.x_test, data.y_test)
        found = replace(found, mean=found.mean.cpu(), members=found.members.cpu())
        write_compact(store.predictions_file, describe_predictions(found, data.y_test))


def remarks(federation: Federation) -> list[str]:
    """What a user should know of a run: an assumption of the method that does not hold, and the notes of its parts."""
    algorithm, schedule, clients = federation.algorithm, federation.schedule, len(federation.data)
    name, own = algorithms.name_of(type(algorithm)) or type(algorithm).__name__, federation.data.x_server
    said = [*federation.data.notes, *schedule.notes, *federation.engine.notes, *algorithm.notes]
    if own is not None and not algorithm.distils:
        said.insert(0, f"{name} makes no use of the {len(own)} inputs that the server holds.")
    if algorithm.full_participation and schedule.clients_per_round < clients:
        said.insert(
            0,
            f"{name} assumes that all clients take part in every round: with {schedule.clients_per_round} of "
            f"{clients}, the server goes by those who report, and the others keep what they remember.",
        )
    return said


def describe(report: RoundReport) -> dict[str, Any]:
    """A round as a record; without times but simulated ones, so that the same run gives the same bytes."""
    record = {
        "round": report.round,
        "age": report.age,
        "loss": report.loss,
        "visits": len(report.plan.client),
        "modes_trained": len(report.trained),
        "bytes_up": report.bytes_up,
        "bytes_down": report.bytes_down,
    }
    if report.turnout is not None:
        asked, late, dropped, away, seconds, clock, _ = report.turnout
        record |= {
            "asked": asked, "late": late, "dropped": dropped, "away": away, "round_seconds": seconds, "clock": clock,
        }  # fmt: skip
    return record


def test(config: Config, federation: Federation, data: FederatedData) -> tuple[dict[str, Any], Prediction | None]:
    """Metrics on the test set, by the way of testing, and the prediction without dropout; empty without a test set."""
    if data.x_test is None or data.y_test is None:
        return {}, None
    x, y = data.x_test, data.y_test
    prediction = _predict(config, federation, x, y)
    found: dict[str, Any] = {"test": evaluate(prediction, y), "modes": evaluate_modes(prediction, y)}
    if config.evaluation.dropout:
        found["test_dropout"] = evaluate(_predict(config, federation, x, y, dropout=True), y)
    return found, prediction


def _predict(config: Config, federation: Federation, x: Tensor, y: Tensor, dropout: bool = False) -> Prediction:
    """What the modes say of the test set; left on the device where that is small."""
    ensemble, size = federation.ensemble, config.evaluation.batch_size
    small = len(ensemble) * y.numel() * (federation.data.classes or 1) <= _ON_DEVICE
    return ensemble.predict(x, batch_size=size, dropout=dropout, on_device=small)


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


def simulated(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The clock after these rounds, and in how many nobody answered; empty where no time is simulated."""
    if "clock" not in records[-1]:
        return {}
    return {"clock": records[-1]["clock"], "unanswered": sum(record["loss"] is None for record in records)}


def _sum_up(config: Config, store: RunFolder, federation: Federation) -> dict[str, Any]:
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
        "seconds": round(federation.seconds, 3),
        "combine": federation.ensemble.combine,
        **simulated(records),
        **{key: value for key, value in records[-1].items() if key.startswith("test")},
    }
