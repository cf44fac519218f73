"""Carries out one run: resumes it, trains, evaluates, checkpoints, and sums it up."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.build import build_data, model_facts
from ..config.schema import Config
from ..core.types import RoundReport
from ..data import FederatedData
from ..durable import json_bytes
from ..engines.distributed.process_group import ProcessGroup
from ..errors import DivergedError, EngineWarning, RankError, StoreError
from ..federation.federation import Federation
from ..predict import Prediction
from ..tracking.tracker import Tracker, catch_up, check_installed, tracking
from .ensemble_file import write_modes
from .evaluation import keep_predictions, test
from .interrupt import Interruption, interruptible
from .prediction_summary import compact_bytes, describe_clients
from .records import describe, environment, run_notes, summarize
from .run_folder import RunFolder, Say
from .setup import Read, assemble, end_round, fingerprint, meet, resume

CHECKPOINT_SECONDS = 10.0
# a run that asks for rounds and ends with its summary
Work = Generator[Federation, RoundReport, dict[str, Any]]


@dataclass
class RunCallbacks:
    """What a run tells whoever watches; the defaults stay silent."""

    say: Say = lambda text: None
    started: Callable[[Config, int], None] = lambda config, round: None
    advanced: Callable[[RoundReport, dict[str, float]], None] = lambda report, metrics: None
    # of several runs, of which the others go on
    failed: Callable[[Exception], None] = lambda error: None


def run(
    config: Config,
    folder: Path,
    watcher: RunCallbacks | None = None,
    *,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ranks: ProcessGroup | None = None,
) -> dict[str, Any]:
    """The summary of a run: read if it is finished, continued if it was interrupted, trained if it
    is new.

    Args:
        config: with its device resolved.
        checkpoint_seconds: least time between two checkpoints; how often they are taken never
            changes a result.
        ranks: the job whose rank 0 this is; the others `follow`.
    """
    watcher = watcher or RunCallbacks()
    with interruptible(watcher.say) as interruption:
        work = run_steps(config, folder, watcher, interruption, checkpoint_seconds, ranks)
        try:
            federation = next(work)
            while True:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", EngineWarning)  # `run_notes` says it
                        report = next(federation.rounds(1))
                except BaseException as error:  # the run must know, to let go of its folder
                    work.throw(error)
                federation = work.send(report)
        except StopIteration as end:
            return dict(end.value)


def run_steps(
    config: Config,
    folder: Path,
    watcher: RunCallbacks,
    interruption: Interruption,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ranks: ProcessGroup | None = None,
    read: Read = build_data,
) -> Work:
    """A run as a generator: it gives its federation whenever it wants a round trained, and is sent
    the report.
    """
    store, ranks = RunFolder(folder), ranks or ProcessGroup()
    store.claim(config)
    try:
        if meet(config, ranks, store.done):
            summary = _unchanged(config, store, read, watcher.say)
            catch_up(config.track, folder, config.values(), store.metrics())
            return summary
        check_installed(config.track)
        data, federation, facts = assemble(config, ranks, read)
        if resume(federation, store.resume(facts, watcher.say), ranks):
            watcher.say(f"Continuing {folder} after round {federation.round}.")
        told = run_notes(federation)
        for sentence in told:
            watcher.say(sentence)
        engine = federation.engine
        facts_of_engine = {
            "precision": engine.precision,
            "ranks": ranks.size,
            "blocks": list(engine.blocks),
        }
        store.write(folder / "env.json", json_bytes({**environment(config), **facts_of_engine}))
        store.write(
            store.clients_file, compact_bytes(describe_clients(data, config.report.publish_clients))
        )
        store.retry()
        watcher.started(config, federation.round)
        with tracking(config.track, folder, config.values(), store.metrics()) as trackers:
            prediction = yield from _train(
                config,
                store,
                federation,
                data,
                facts,
                watcher,
                interruption,
                checkpoint_seconds,
                trackers,
                ranks,
            )
        for sentence in (new for new in run_notes(federation) if new not in told):
            watcher.say(sentence)
        store.check_claim()
        write_modes(
            store.modes_file,
            federation.ensemble,
            {"model": model_facts(data, config.training.loss)},
        )
        keep_predictions(config, store, federation, data, prediction)
        records = store.metrics()
        complete = bool(records) and records[-1]["round"] == federation.round
        tested = records[-1] if complete else test(config, federation, data)[0]
        store.finish({**summarize(config, store, federation, tested), **facts})
        return store.summary()
    except DivergedError as error:
        store.diverge(error)
        raise
    except RankError as error:
        raise RankError(f"{error} {store.kept()}") from None
    finally:
        store.release()


def _unchanged(config: Config, store: RunFolder, read: Read, say: Say) -> dict[str, Any]:
    """The summary of a finished run; raises if it was trained on a file of the user's that has
    changed since.
    """
    summary = store.summary()
    store.check_modes()
    if changes := store.changes():
        say(changes)
    if config.data["source"] == "npz" and fingerprint(read(config)) != summary.get("data"):
        raise StoreError(
            f"{config.data['path']} has changed since {store.path} was trained on it. Choose another --out or --runs."
        )
    return summary


def _train(
    config: Config,
    store: RunFolder,
    federation: Federation,
    data: FederatedData,
    facts: dict[str, Any],
    watcher: RunCallbacks,
    interruption: Interruption,
    checkpoint_seconds: float,
    trackers: Sequence[Tracker],
    ranks: ProcessGroup,
) -> Generator[Federation, RoundReport, Prediction | None]:
    """Asks for the rounds that are left, and ends with what is predicted after them, where that is
    known.

    A Ctrl-C ends it after the round, with that round on disk.
    """
    saved_at = time.monotonic()
    prediction: Prediction | None = None
    latest: dict[str, float] = {}
    while federation.round < config.rounds:
        report = yield federation
        record = describe(report)
        if report.round == config.last_test(report.round):
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
            store.save(federation.checkpoint_tensors(), federation.round, facts)
            saved_at = time.monotonic()
        if stop:
            raise KeyboardInterrupt
    return prediction
