"""Trains one run: resumes it, evaluates, writes checkpoints and the summary."""

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
from ..data.sources.user_file import USER_FILES
from ..durable import json_bytes
from ..engines.distributed.process_group import ProcessGroup
from ..errors import DivergedError, EngineWarning, RankError, StoreError
from ..federation.calibration import check_calibration
from ..federation.federation import Federation
from ..federation.mode_bank import own_models
from ..prediction import Prediction
from ..tracking.tracker import Tracker, catch_up, check_installed, tracking
from .evaluation import (
    TEST_KEYS,
    describe_calibration,
    evaluate_run,
    write_prediction_summary,
)
from .interrupt import Interruption, interruptible
from .personal_tests import PERSONAL_KEYS, evaluate_personal
from .prediction_summary import compact_bytes, describe_clients
from .records import describe, engine_facts, environment, run_notes, summarize
from .setup import DataLoader, assemble, check_ranks_agree, end_round, fingerprint, resume
from .storage.divergence import DivergenceMonitor, untrained_loss
from .storage.ensemble_file import category_facts, write_modes
from .storage.run_folder import RunFolder, Say
from .uncertainty_summary import load_ood

CHECKPOINT_SECONDS = 10.0
RECORD_SECONDS = 1.0  # between writes of records, if only the results are wanted
# A run as a generator: it yields its federation, is sent the report of the next round, and returns
# the summary.
RunSteps = Generator[Federation, RoundReport, dict[str, Any]]


@dataclass
class RunCallbacks:
    """Functions that a run calls to show its progress; the defaults do nothing.

    Attributes:
        on_message: called with messages for the user.
        on_train_start: called with the config and the number of completed rounds.
        on_round_end: called with the report of each round and the latest test metrics.
        on_error: called with the error if one of several runs fails; the others continue.
        stop_exploded: end a run whose loss has exploded with a DivergedError, as one whose loss is
            not finite; otherwise there is a warning, and training continues.
        results_only: test after the last round only, write the records of rounds every second, and
            write no files that only a report or a longer run needs: clients.json, predictions.json,
            and a checkpoint of the last round.
    """

    on_message: Say = lambda text: None
    on_train_start: Callable[[Config, int], None] = lambda config, round: None
    on_round_end: Callable[[RoundReport, dict[str, float]], None] = lambda report, metrics: None
    on_error: Callable[[Exception], None] = lambda error: None
    stop_exploded: bool = False
    results_only: bool = False


def run(
    config: Config,
    folder: Path,
    callbacks: RunCallbacks | None = None,
    *,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ranks: ProcessGroup | None = None,
    extendable: Sequence[Path] = (),
) -> dict[str, Any]:
    """Returns the summary of a run, after training the rounds that are not done yet.

    A finished run is not trained again; an interrupted run is resumed. If the folder holds the same
    run with fewer rounds, it is extended.

    Args:
        config: with its device resolved.
        folder: of the run.
        callbacks: show the progress.
        checkpoint_seconds: minimum time between checkpoints; it does not change any result.
        ranks: the job, if this process is its rank 0; the other ranks call `follow_rank0`.
        extendable: checkpoints of the same run with fewer rounds, from which a new run may start.
    """
    callbacks = callbacks or RunCallbacks()
    with interruptible(callbacks.on_message) as interruption:
        steps = run_steps(
            config,
            folder,
            callbacks,
            interruption,
            checkpoint_seconds,
            ranks,
            extendable=extendable,
        )
        try:
            federation = next(steps)
            while True:
                try:
                    with warnings.catch_warnings():
                        # `run_notes` contains the same messages.
                        warnings.simplefilter("ignore", EngineWarning)
                        report = next(federation.rounds(1))
                except BaseException as error:
                    # The generator must see the error, to record it and release its folder. It
                    # raises the error again.
                    steps.throw(error)
                federation = steps.send(report)
        except StopIteration as end:
            return dict(end.value)


def run_steps(
    config: Config,
    folder: Path,
    callbacks: RunCallbacks,
    interruption: Interruption,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ranks: ProcessGroup | None = None,
    load_data: DataLoader = build_data,
    extendable: Sequence[Path] = (),
) -> RunSteps:
    """A run as a generator: yields its federation for each round, and is sent the report.

    The caller trains the rounds. It can thus train one round of several runs in one batch.

    Args:
        config: with its device resolved.
        folder: of the run.
        callbacks: show the progress.
        interruption: set by Ctrl-C; the run stops after the current round.
        checkpoint_seconds: minimum time between checkpoints.
        ranks: the job whose rank 0 this process is.
        load_data: returns the clients' data for a config.
        extendable: checkpoints of runs that differ only in having other numbers of rounds.
    """
    store, ranks = RunFolder(folder), ranks or ProcessGroup()
    store.claim(config, begin=False)
    try:
        if check_ranks_agree(config, ranks, store.done and store.extends is None):
            summary = _read_finished(config, store, load_data, callbacks.on_message)
            catch_up(config.track, folder, config.values(), store.metrics())
            return summary
        check_installed(config.track)
        if callbacks.results_only:
            store.delay_metrics(RECORD_SECONDS)
        data, federation, facts = assemble(config, ranks, load_data)
        _check_last_steps(config, federation)
        if resume(federation, store.resume(facts, callbacks.on_message, extendable), ranks):
            callbacks.on_message(f"Continuing {folder} after round {federation.round}.")
        store.drop_test(config, TEST_KEYS, PERSONAL_KEYS)
        notes = run_notes(federation)
        notes += [note] if (note := federation.average.note(config.rounds)) else []
        for note in notes:
            callbacks.on_message(note)
        _write_facts(config, store, federation, ranks, with_clients=not callbacks.results_only)
        store.clear_diverged()
        monitor = DivergenceMonitor(
            untrained_loss(federation),
            config.rounds,
            (record["loss"] for record in store.metrics()),
        )
        callbacks.on_train_start(config, federation.round)
        with tracking(config.track, folder, config.values(), store.metrics()) as trackers:
            prediction = yield from _train(
                config,
                store,
                federation,
                data,
                facts,
                callbacks,
                interruption,
                checkpoint_seconds,
                trackers,
                ranks,
                monitor,
            )
        # Engines may add notes during training, e.g. that a block did not fit into memory.
        for note in (note for note in run_notes(federation) if note not in notes):
            callbacks.on_message(note)
        store.check_claim()
        records = store.metrics()
        # The record of the last round has the final metrics, unless it was lost (see
        # `RunFolder.resume`).
        complete = bool(records) and records[-1]["round"] == federation.round
        metrics = (
            records[-1]
            if complete or (ranks.size > 1 and federation.algorithm.personal)
            else evaluate_run(config, federation, data)[0] | evaluate_personal(config, federation)
        )
        # After the test, which is without calibration.
        calibration, prediction = _calibrate(config, federation, data, prediction)
        model = model_facts(data, config.training.loss)
        model_and_columns = {"model": model, **category_facts(data)}
        write_modes(store.modes_file, federation.ensemble, model_and_columns)
        if not callbacks.results_only:
            write_prediction_summary(config, store, federation.ensemble, data, prediction)
        summary = {**summarize(config, store, federation, metrics, calibration), **facts}
        if monitor.message:
            # The run is finished, and its files are complete: nothing is lost if the user judges
            # otherwise. Both files say that its results are those of a run that has diverged.
            store.mark_diverged(DivergedError(monitor.message))
            summary["diverged"] = monitor.message
        store.finish(summary)
        return store.summary()
    except DivergedError as error:
        store.mark_diverged(error)
        raise
    except RankError as error:
        raise RankError(f"{error} {store.resume_advice()}") from None
    finally:
        store.release()


def _write_facts(
    config: Config,
    store: RunFolder,
    federation: Federation,
    ranks: ProcessGroup,
    *,
    with_clients: bool,
) -> None:
    """Writes env.json, and clients.json if it is wanted."""
    facts = engine_facts(federation.engine, ranks.size)
    facts["visit_memory"] = federation.visit_memory._asdict()
    store.write(store.path / "env.json", json_bytes({**environment(config), **facts}))
    if with_clients:
        clients = describe_clients(federation.data, config.report.publish_clients)
        store.write(store.clients_file, compact_bytes(clients))


def _check_last_steps(config: Config, federation: Federation) -> None:
    """Raises before the training for what could otherwise only fail after it."""
    if config.calibration is not None:
        check_calibration(federation, config.calibration.settings())
    if config.evaluation.ood:
        load_ood(config.evaluation.ood, federation.data)


def _calibrate(
    config: Config, federation: Federation, data: FederatedData, prediction: Prediction | None
) -> tuple[dict[str, Any] | None, Prediction | None]:
    """Calibrates as the config says; returns the summary's entry and the new test prediction.

    Returns None and the prediction as it was if the config does not calibrate.
    """
    if config.calibration is None:
        return None, prediction
    federation.calibrate(**config.calibration.model_dump())
    return describe_calibration(config, federation.ensemble, data)


def _read_finished(
    config: Config, store: RunFolder, load_data: DataLoader, say: Say
) -> dict[str, Any]:
    """Returns the summary of a finished run; raises if the user's data file has changed since."""
    summary = store.summary()
    store.check_modes()
    if changes := store.changes():
        say(changes)
    # Datasets other than the user's own files are fixed by their settings.
    if config.data["source"] in USER_FILES and fingerprint(load_data(config)) != summary.get(
        "data"
    ):
        raise StoreError(
            f"{config.data['path']} has changed since {store.path} was trained on it. "
            "Choose another --out or --runs."
        )
    return summary


def _train(
    config: Config,
    store: RunFolder,
    federation: Federation,
    data: FederatedData,
    facts: dict[str, Any],
    callbacks: RunCallbacks,
    interruption: Interruption,
    checkpoint_seconds: float,
    trackers: Sequence[Tracker],
    ranks: ProcessGroup,
    monitor: DivergenceMonitor,
) -> Generator[Federation, RoundReport, Prediction | None]:
    """Yields the federation for each round that is left; returns the prediction of the last test.

    The prediction is None if no round was left. After Ctrl-C it saves the round and raises
    KeyboardInterrupt.
    """
    saved_at = time.monotonic()
    final_prediction: Prediction | None = None
    latest_test: dict[str, float] = {}
    warned = False
    while federation.round < config.rounds:
        report = yield federation
        record = describe(report)
        tests = not callbacks.results_only or report.round == config.rounds
        if tests and report.round == config.last_test(report.round):
            if federation.algorithm.personal:
                own_models(federation)  # collective, as in `follow_rank0`
            metrics, prediction = evaluate_run(config, federation, data)
            final_prediction = prediction if report.round == config.rounds else None
            record |= metrics
            if report.round == config.rounds:
                record |= evaluate_personal(config, federation)
            latest_test = metrics.get("test", {})
        store.append_metrics(record)
        for tracker in trackers:
            tracker.record(record)
        callbacks.on_round_end(report, latest_test)
        monitor.observe(report.loss)
        if monitor.message and callbacks.stop_exploded:
            raise DivergedError(monitor.message)
        if monitor.message and not warned:
            callbacks.on_message(f"warning: {store.path}: {monitor.message} Training continues.")
            warned = True
        due = time.monotonic() - saved_at >= checkpoint_seconds
        last = report.round == config.rounds and not callbacks.results_only
        save, stop = end_round(ranks, interruption.requested, due or last)
        if save:
            store.save(federation.checkpoint_tensors(), federation.round, facts)
            saved_at = time.monotonic()
        if stop:
            raise KeyboardInterrupt
    return final_prediction
