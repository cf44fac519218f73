"""Server of a fleet: enrols the clients, trains the remaining rounds, and writes a run folder."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import Tensor

from ..config.plugins import build_aggregator, build_average, build_participation
from ..core.aggregator import check_aggregator, few_clients, gathering
from ..core.average import NO_AVERAGE, Average, NoAverage, check_average, prediction_models
from ..core.parameters.shared import check_patterns
from ..core.participation import Costs
from ..core.round import run_round
from ..core.types import EnsembleState, Outcome, RoundReport
from ..core.visits.joint import check_joint, visit_vectors
from ..durable import json_bytes, write_json
from ..engines.flower.deadline import RoundTimeout
from ..engines.flower.engine import FlowerEngine
from ..engines.flower.mode_checks import FiniteModeCheck
from ..engines.flower.roster import Member, Roster
from ..engines.flower.running_statistics import BufferRules
from ..errors import InputError
from ..experiment.evaluation import (
    describe_calibration,
    evaluate_run,
    write_prediction_summary,
)
from ..experiment.prediction_summary import MAX_CLIENTS, compact_bytes
from ..experiment.records import describe, environment, with_calibration
from ..experiment.storage.ensemble_file import write_modes
from ..experiment.storage.read_json import need_keys, read_json
from ..experiment.storage.run_folder import RunFolder
from ..federation.resolve import (
    resolve_participation,
    resolve_schedule,
    resolve_shared,
    resolve_work,
)
from ..federation.serialization import check_frozen, with_frozen
from ..modeling.functional_model import FunctionalModel
from ..modeling.server_context import ServerContext
from ..predict import Ensemble
from ..text import shorten
from ..uncertainty.calibration import Calibration
from .app_spec import AppSpec
from .fleet_calibration import calibrate_fleet
from .fleet_personal import PersonalRequest, check_heads, personalize_fleet
from .safeguards import build_limits, cohort_notes, weight_notes
from .server_settings import Settings
from .server_test_set import read_test_set

logger = logging.getLogger("flwr")

ROSTER = "roster.json"


def run_fleet(grid: Grid, spec: AppSpec, run_config: Mapping[str, Any]) -> None:
    """Trains an app's config on the clients behind a grid.

    If the run's folder exists, training continues after the last round in it.
    """
    settings, config = Settings.read(run_config), spec.config
    store = RunFolder(Path(settings.run_dir or f"runs/{config.name}-fleet").expanduser())
    store.claim(config)
    try:
        if store.done:
            logger.info("%s is finished: nothing to do.", store.path)
            return
        fleet = Fleet(grid, spec, settings, store)
        store.write(store.path / "env.json", json_bytes(environment(config)))
        started = time.monotonic()
        while fleet.state.round < config.rounds:
            fleet.train_one_round()
        fleet.finish(time.monotonic() - started)
    finally:
        store.release()


class Fleet:
    """A training on real clients, resumed after the last round in its run folder."""

    def __init__(self, grid: Grid, spec: AppSpec, settings: Settings, store: RunFolder) -> None:
        config, self.spec, self.store = spec.config, spec, store
        self.model = self._build_model()
        self.test_data = read_test_set(spec, settings.test_file)
        roster, training = load_or_enrol(
            grid, settings, store.path / ROSTER, self.model.frozen_fingerprint
        )
        store.write(store.clients_file, compact_bytes(self.describe_clients(roster)))
        table = config.ensemble
        base_schedule = resolve_schedule(
            table.schedule, table.modes, table.strata, table.clients_per_round, len(roster)
        )
        server_context = ServerContext(
            self.model,
            torch.zeros(1, *spec.shape, dtype=self.model.dtype),
            clients_per_mode=base_schedule.clients_per_mode,
            training_examples=sum(member.examples for member in roster.members),
        )
        self.algorithm = spec.algorithm.bind(server_context)
        check_joint(self.algorithm, base_schedule, attack=None)
        for note in self.algorithm.notes:
            logger.info("%s", note)
        # With over-selection the schedule selects more clients than `clients_per_round`; the round
        # then keeps the replies of as many as the config wants.
        self.participation = resolve_participation(
            build_participation(config.participation), spec.algorithm
        )
        self.schedule = self.participation.selection_schedule(base_schedule)
        over_selects = base_schedule.clients_per_round < self.schedule.clients_per_round
        visits = base_schedule.clients_per_round * (
            1 if base_schedule.one_mode_per_client else base_schedule.modes
        )
        keep = settings.keep or (visits if over_selects else None)
        self.engine = FlowerEngine(
            roster,
            config.seed,
            self.schedule.modes,
            training,
            RoundTimeout(settings.timeout, keep, settings.poll),
            build_limits(settings, config.training.loss),
            buffer_rules=BufferRules.from_model(
                self.model, table.modes if self.algorithm.joint else 1
            ),
            finite_check=FiniteModeCheck(self.model, spec.shape),
        )
        self.engine.reports_visits = self.schedule.needs_reports
        initial = self.model.init_params(config.seed, self.schedule.modes)
        theta, buffers = self.algorithm.start_modes(*initial)
        self.shared = resolve_shared(
            check_patterns(table.shared), self.model, self.algorithm, base_schedule, theta[0]
        )
        if self.shared is not None:
            theta, buffers = self.shared.copy_first(theta, buffers)
        self.aggregator = build_aggregator(config.aggregator)
        visit_theta, _ = visit_vectors(self.algorithm, theta, buffers)
        check_aggregator(self.aggregator, self.algorithm, visit_theta)
        self.average = build_average(config.average)
        check_average(self.average, self.algorithm)
        if self.aggregator.gathers:
            self.algorithm = gathering(self.algorithm)
        if table.personal:
            self.algorithm = spec.with_personal_parts(self.model, self.algorithm)
            theta, buffers = self.algorithm.start_modes(*initial)
        schedule_state = self.schedule.init(len(roster), config.seed)
        few = few_clients(self.aggregator, (keep or visits) / self.schedule.modes)
        notes = [few] if few else []
        notes += cohort_notes(
            base_schedule, schedule_state, settings.min_cohort, joint=self.algorithm.joint
        )
        self._warn_of(notes, roster)
        self.state = EnsembleState(
            0,
            self.algorithm.init_mode(theta),
            buffers,
            schedule_state,
            average=self.average.init(theta, buffers),
        )
        local = config.training
        work = resolve_work(
            self.model, local.epochs, local.steps, local.batch_size, local.last_batch
        )
        sizes = self.engine.sizes
        work = replace(work, batch_size=min(work.batch_size, int(sizes.max())))
        # The steps of visits are needed if some of them stop early.
        self.costs = Costs(self.algorithm, visit_theta, 0, sizes, work, config.seed)
        # A checkpoint can only be resumed with the clients it was trained on. The roster's hash,
        # which is stored in the checkpoint, ensures that.
        self.facts = {"data": sha256((store.path / ROSTER).read_bytes()).hexdigest()}
        self._resume()

    def _resume(self) -> None:
        """Continues after the last checkpoint, if there is one."""
        checkpoint = self.store.resume(self.facts, logger.warning)
        if checkpoint is not None:
            tensors, round = checkpoint
            tensors = dict(check_frozen(tensors, self.model))
            self.state, engine_state = EnsembleState.of(tensors, round, "cpu")
            self.engine.load_client_state(engine_state)
            logger.info("Continuing %s after round %d.", self.store.path, self.state.round)

    def _build_model(self) -> FunctionalModel:
        """Returns the model; raises if the config names parameters for `head` that it lacks."""
        model, personal = self.spec.build_model("cpu"), self.spec.config.personalize
        if personal is not None:
            check_heads(personal.settings(), model)
        return model

    def _warn_of(self, notes: list[str], roster: Roster) -> None:
        """Logs warnings, and those on the weights of clients and on the average."""
        if self.algorithm.weighting == "examples":
            names = [member.name for member in roster.members]
            notes = notes + weight_notes(names, self.engine.sizes, self.engine.weights)
        if note := self.average.note(self.spec.config.rounds):
            notes = [*notes, note]
        for note in notes:
            _warn(note)

    def describe_clients(self, roster: Roster) -> dict[str, Any]:
        """Returns names and sizes of the clients as they enrolled, for the report."""
        sizes, tests = [member.examples for member in roster.members], self.test_data.y_test
        summary = {
            "clients": len(sizes),
            "examples": sum(sizes),
            "test_examples": 0 if tests is None else len(tests),
            "source": "fleet",
            "partition": "",
        }
        if not self.spec.config.report.publish_clients:
            return {**summary, "published": False}
        names = [member.name for member in roster.members]
        return {**summary, "size": sizes[:MAX_CLIENTS], "names": names[:MAX_CLIENTS]}

    def train_one_round(self) -> None:
        """Trains one round and saves it."""
        plan = self.schedule.plan(self.state.schedule, self.state.round)
        plan = self.participation.limit_steps(plan, self.state.round, self.costs)
        self.state, report = run_round(
            self.state,
            outcome=Outcome(plan, self.state.participation),
            algorithm=self.algorithm,
            schedule=self.schedule,
            engine=self.engine,
            aggregator=self.aggregator,
            shared=self.shared,
            average=self.average,
        )
        log, config = self.engine.log, self.spec.config
        record = {**describe(report), "fleet": log.to_record()}
        if report.round == config.last_test(report.round):
            record |= evaluate_run(config, self, self.test_data)[0]
        self.store.append_metrics(record)
        tensors = self.state.tensors(self.engine.client_state_tensors())
        self.store.save(with_frozen(tensors, self.model), self.state.round, self.facts)
        line = format_round(report, len(log.lost), len(log.refused), len(log.late))
        logger.info("%s%s", line, format_test(record.get("test", {})))

    @property
    def ensemble(self) -> Ensemble:
        """The K modes, or their averages over rounds if the config has an average."""
        return self._make_ensemble(self.average)

    @property
    def last_ensemble(self) -> Ensemble | None:
        """The K modes in their current state, without the average; None if there is no average."""
        return None if isinstance(self.average, NoAverage) else self._make_ensemble(NO_AVERAGE)

    def _make_ensemble(self, average: Average) -> Ensemble:
        config = self.spec.config
        return Ensemble(
            self.model,
            **prediction_models(self.state, self.algorithm, average, config.seed)._asdict(),
            standardise=self.spec.schema.standardise,
            combine=config.ensemble.combine,
            input_shape=self.spec.shape,
            seed=config.seed,
            tokens=self.spec.schema.tokens,
            class_names=self.spec.class_names,
            feature_names=self.spec.schema.columns,
            shared=None if self.shared is None else self.shared.parameters,
            dropout_samples=config.ensemble.dropout_samples or 0,
        )

    def finish(self, seconds: float) -> None:
        """Writes modes and summary like a simulated run, for `fedensemble predict` and `report`."""
        config, records, ensemble = self.spec.config, self.store.metrics(), self.ensemble
        self.store.check_claim()
        ensemble.calibration = self._calibrate(ensemble)
        write_modes(self.store.modes_file, ensemble, {"model": self.spec.model})
        calibration, prediction = None, None
        if ensemble.calibration is not None:
            calibration, prediction = describe_calibration(config, ensemble, self.test_data)
        write_prediction_summary(config, self.store, ensemble, self.test_data, prediction)
        summary = {
            "name": config.name,
            "hash": config.hash(),
            "rounds": self.state.round,
            "modes": self.schedule.modes,
            "parameters": self.model.theta_layout.total,
            "task": self.model.task,
            "bytes_up": sum(record["bytes_up"] for record in records),
            "bytes_down": sum(record["bytes_down"] for record in records),
            "prediction_models": ensemble.prediction_models,
            "prediction_bytes": ensemble.prediction_bytes,
            "seconds": round(seconds, 3),
            "combine": ensemble.combine,
            **{key: value for key, value in records[-1].items() if key.startswith("test")},
        }
        summary = with_calibration(summary, calibration)
        if (personal := self._personalize()) is not None:
            summary |= {"personalize": personal}
            summary |= {key: summary[key] + personal[key] for key in ("bytes_up", "bytes_down")}
        self.store.finish({**summary, **self.facts})
        logger.info("Finished: the modes are in %s.", self.store.modes_file)

    def _calibrate(self, ensemble: Ensemble) -> Calibration | None:
        """Returns the calibration that the config asks for; None without one, or if it fails.

        A failure is logged, and the run is finished without: its training is not lost.
        """
        config = self.spec.config
        if config.calibration is None:
            return None
        logger.info("Calibrating by the calibration rows of the clients.")
        try:
            made = calibrate_fleet(
                ensemble,
                config.calibration.settings(),
                self.engine.roster,
                self.engine.training,
                self.engine.round_timeout,
                share=float(config.data["calibration"]),
                fewest=self.engine.limits.min_cohort,
                clock=self.engine.clock,
            )
        except InputError as error:
            _warn(f"The ensemble is not calibrated: {error}")
            return None
        logger.info("%s", made)
        return made

    def _personalize(self) -> dict[str, Any] | None:
        """Has the clients make the models that the config asks for; returns what is known of them.

        Returns None without `[personalize]`, or if it fails, which is logged.
        """
        config = self.spec.config
        if config.personalize is None:
            return None
        logger.info("Each client makes its personal models.")
        request = PersonalRequest(
            config.personalize.settings(),
            share=float(config.data["calibration"]),
            largest=int(self.engine.sizes.max()),
            publish=config.report.publish_clients,
            fewest=self.engine.limits.min_cohort,
            regression=self.model.task == "regression",
        )
        engine = self.engine
        try:
            found = personalize_fleet(
                self.ensemble,
                request,
                engine.roster,
                engine.training,
                engine.round_timeout,
                engine.clock,
            )
        except InputError as error:
            _warn(f"No personal models were made: {error}")
            return None
        logger.info("%d clients have personal models.", found["clients"])
        return found


def load_or_enrol(
    grid: Grid, settings: Settings, file: Path, frozen: Tensor | None = None
) -> tuple[Roster, str]:
    """Returns the clients and the name of the training, from the roster file or by enrolment.

    Args:
        frozen: fingerprint of the model's frozen parameters, which clients must have as well.
    """
    roster = Roster(
        grid,
        settings.identity,
        max_examples=settings.max_examples,
        poll=settings.poll,
        log=_warn,
        frozen=frozen,
    )
    if file.exists():
        saved = read_json(file)
        need_keys(file, saved, ("training", "identity", "members"))
        roster.identity = saved["identity"]
        if settings.identity not in ("auto", roster.identity):
            logger.warning(
                'The clients of %s were enrolled by %s; identity = "%s" is for new runs only.',
                file.parent,
                roster.identity,
                settings.identity,
            )
        roster.members = tuple(
            Member.from_record(record, roster.identity) for record in saved["members"]
        )
        return roster, str(saved["training"])
    logger.info("Waiting until %d clients are enrolled.", settings.clients)
    roster.enrol(settings.clients, settings.enrol_timeout)
    training = secrets.token_hex(8)
    members = [member.to_record() for member in roster.members]
    write_json(file, {"training": training, "identity": roster.identity, "members": members})
    return roster, training


def _warn(text: str) -> None:
    """Logs a line that may contain text from a client."""
    logger.warning("%s", shorten(text, 1000))


def format_round(report: RoundReport, lost: int, rejected: int, late: int) -> str:
    """Returns a round on one line."""
    loss = "no client replied" if report.loss is None else f"loss {report.loss:.4f}"
    return (
        f"round {report.round}: {len(report.plan.client)} replies, {loss}, {lost} lost, "
        f"{rejected} rejected, {late} late"
    )


def format_test(metrics: Mapping[str, float]) -> str:
    """Returns the main metric of a test, to follow a round on its line; "" without a test.

    >>> format_test({"accuracy": 0.91234, "nll": 0.3})
    ', test accuracy 0.9123'
    """
    name = next((name for name in ("accuracy", "mse") if name in metrics), None)
    return "" if name is None else f", test {name} {metrics[name]:.4g}"
