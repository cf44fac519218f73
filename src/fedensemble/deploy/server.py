"""The server of a fleet: enrols the clients, trains the rounds that are left, leaves a run folder
like any other.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid

from ..config.plugins import build_aggregator, build_participation
from ..core.aggregator import check_aggregator, few_clients, gathering
from ..core.round import run_round
from ..core.types import EnsembleState, RoundReport
from ..durable import json_bytes, write_json
from ..engines.flower.deadline import RoundTimeout
from ..engines.flower.engine import FlowerEngine
from ..engines.flower.finite_checks import Soundness
from ..engines.flower.roster import Member, Roster
from ..engines.flower.running_statistics import Statistics
from ..experiment.ensemble_file import write_modes
from ..experiment.read_json import need_keys, read_json
from ..experiment.records import describe, environment
from ..experiment.run_folder import RunFolder
from ..federation.resolve import resolve_schedule
from ..modeling.server_context import ServerContext
from ..predict import Ensemble
from ..text import shorten
from .app_spec import Description
from .safeguards import cohort_remarks, find_limits, weight_remarks
from .server_settings import Settings

logger = logging.getLogger("flwr")

ROSTER = "roster.json"


def run_fleet(grid: Grid, description: Description, given: Mapping[str, Any]) -> None:
    """Trains a config on the clients behind a grid; again on the same folder, it goes on after the
    last round.
    """
    settings, config = Settings.read(given), description.config
    store = RunFolder(Path(settings.run_dir or f"runs/{config.name}-fleet").expanduser())
    store.claim(config)
    try:
        if store.done:
            logger.info("%s is finished: nothing to do.", store.path)
            return
        fleet = Fleet(grid, description, settings, store)
        store.write(store.path / "env.json", json_bytes(environment(config)))
        started = time.monotonic()
        while fleet.state.round < config.rounds:
            fleet.train_one_round()
        fleet.finish(time.monotonic() - started)
    finally:
        store.release()


class Fleet:
    """A training on real clients, at the round where its folder says it is."""

    def __init__(
        self, grid: Grid, description: Description, settings: Settings, store: RunFolder
    ) -> None:
        config, self.description, self.store = description.config, description, store
        self.learner = description.learner("cpu")
        example = torch.zeros(1, *description.shape, dtype=self.learner.dtype)
        roster, training = enrolled(grid, settings, store.path / ROSTER)
        table = config.ensemble
        wanted = resolve_schedule(
            table.schedule, table.modes, table.strata, table.clients_per_round, len(roster)
        )
        workshop = ServerContext(self.learner, example, clients_per_mode=wanted.clients_per_mode)
        self.algorithm = description.algorithm.bind(workshop)
        for note in self.algorithm.notes:
            logger.info("%s", note)
        self.schedule = build_participation(config.participation).asking(wanted)
        fewer = wanted.clients_per_round < self.schedule.clients_per_round
        visits = wanted.clients_per_round * (1 if wanted.one_mode_a_client else wanted.modes)
        keep = settings.keep or (visits if fewer else None)
        self.engine = FlowerEngine(
            roster,
            config.seed,
            self.schedule.modes,
            training,
            RoundTimeout(settings.timeout, keep, settings.poll),
            find_limits(settings, config.training.loss),
            statistics=Statistics.of(self.learner),
            soundness=Soundness(self.learner, description.shape),
        )
        theta, buffers = self.learner.initial(config.seed, self.schedule.modes)
        self.aggregator = build_aggregator(config.aggregator)
        check_aggregator(self.aggregator, self.algorithm, theta[0])
        if self.aggregator.gathers:
            self.algorithm = gathering(self.algorithm)
        note = few_clients(self.aggregator, (keep or visits) / self.schedule.modes)
        if note:
            logger.warning("%s", note)
        planned = self.schedule.init(len(roster), config.seed)
        remarks = cohort_remarks(wanted, planned, settings.min_cohort)
        if self.algorithm.weighting == "examples":
            names = [member.name for member in roster.members]
            remarks += weight_remarks(names, self.engine.sizes, self.engine.weights)
        for remark in remarks:
            _warn(remark)
        self.state = EnsembleState(0, self.algorithm.init_mode(theta), buffers, planned)
        self.facts = {"data": sha256((store.path / ROSTER).read_bytes()).hexdigest()}
        found = store.resume(self.facts, logger.warning)
        if found is not None:
            self.state, memory = EnsembleState.of(*found, "cpu")
            self.engine.load_memory(memory)
            logger.info("Continuing %s after round %d.", store.path, self.state.round)

    def train_one_round(self) -> None:
        """One round, on disk when it is over."""
        self.state, report = run_round(
            self.state,
            algorithm=self.algorithm,
            schedule=self.schedule,
            engine=self.engine,
            aggregator=self.aggregator,
        )
        log = self.engine.log
        self.store.append_metrics({**describe(report), "fleet": log.record()})
        self.store.save(
            self.state.tensors(self.engine.memory_tensors()), self.state.round, self.facts
        )
        logger.info("%s", sentence(report, len(log.lost), len(log.refused), len(log.late)))

    @property
    def ensemble(self) -> Ensemble:
        """The K modes as they are now."""
        config = self.description.config
        return Ensemble(
            self.learner,
            self.state.modes["theta"],
            self.state.buffers,
            standardise=self.description.standardise,
            combine=config.ensemble.combine,
            input_shape=self.description.shape,
            seed=config.seed,
            predictors=self.algorithm.predictors(self.state.modes),
        )

    def finish(self, seconds: float) -> None:
        """Writes the modes as a simulated run does, so that `fedensemble predict` and `report` take
        them.
        """
        config, records, ensemble = self.description.config, self.store.metrics(), self.ensemble
        self.store.check_claim()
        write_modes(self.store.modes_file, ensemble, {"model": self.description.model})
        summary = {
            "name": config.name,
            "hash": config.hash(),
            "rounds": self.state.round,
            "modes": self.schedule.modes,
            "parameters": self.learner.theta_layout.total,
            "task": self.learner.task,
            "bytes_up": sum(record["bytes_up"] for record in records),
            "bytes_down": sum(record["bytes_down"] for record in records),
            "prediction_models": ensemble.prediction_models,
            "prediction_bytes": ensemble.prediction_bytes,
            "seconds": round(seconds, 3),
            "combine": ensemble.combine,
        }
        self.store.finish({**summary, **self.facts})
        logger.info("Finished: the modes are in %s.", self.store.modes_file)


def enrolled(grid: Grid, settings: Settings, file: Path) -> tuple[Roster, str]:
    """The clients of the training and its name: those the folder knows, or those that are there
    now.
    """
    roster = Roster(
        grid, settings.identity, most=settings.max_examples, poll=settings.poll, say=_warn
    )
    if file.exists():
        known = read_json(file)
        need_keys(file, known, ("training", "identity", "members"))
        roster.identity = known["identity"]
        if settings.identity not in ("auto", roster.identity):
            logger.warning(
                'The clients of %s were enrolled by %s; identity = "%s" is for new runs only.',
                file.parent,
                roster.identity,
                settings.identity,
            )
        roster.members = tuple(
            Member.from_record(record, roster.identity) for record in known["members"]
        )
        return roster, str(known["training"])
    roster.enrol(settings.clients, settings.enrol_timeout)
    training = secrets.token_hex(8)
    members = [member.record() for member in roster.members]
    write_json(file, {"training": training, "identity": roster.identity, "members": members})
    return roster, training


def _warn(text: str) -> None:
    """A line in the log that may hold a client's words."""
    logger.warning("%s", shorten(text, 1000))


def sentence(report: RoundReport, lost: int, refused: int, late: int) -> str:
    """A round on one line."""
    loss = "nobody answered" if report.loss is None else f"loss {report.loss:.4f}"
    return f"round {report.round}: {len(report.plan.client)} answers, {loss}, {lost} lost, {refused} refused, {late} late"
