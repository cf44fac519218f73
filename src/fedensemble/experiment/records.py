"""What is said and written of a run: remarks, what it was carried out with, a record of each round, a summary."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..algorithms import FedProx
from ..core.algorithm import algorithms
from ..core.types import RoundReport
from ..federation import Federation
from ..machine import processor
from ..version import VERSION
from .config import Config
from .store import RunFolder


def remarks(federation: Federation) -> list[str]:
    """What a user should know of a run: an assumption of the method that does not hold, and the notes of its parts."""
    algorithm, schedule, clients = federation.algorithm, federation.schedule, len(federation.data)
    name, own = algorithms.name_of(type(algorithm)) or type(algorithm).__name__, federation.data.x_server
    said = [*federation.data.notes, *schedule.notes, *federation.engine.notes, *algorithm.notes]
    steps = int(federation.work.count(federation.data.size).max())
    if type(algorithm) is FedProx and algorithm.mu > 0 and steps == 1:
        said.insert(
            0,
            "With one local step FedProx is FedAvg: where a client starts, mu pulls nowhere. For more steps raise "
            "training.epochs or training.steps, or lower training.batch_size.",
        )
    if own is not None and not algorithm.distils:
        said.insert(0, f"{name} makes no use of the {len(own)} inputs that the server holds.")
    if algorithm.full_participation and schedule.clients_per_round < clients:
        said.insert(
            0,
            f"{name} assumes that all clients take part in every round: with {schedule.clients_per_round} of "
            f"{clients}, the server goes by those who report, and the others keep what they remember.",
        )
    return said


def environment(config: Config) -> dict[str, Any]:
    """What the run is carried out with."""
    cuda = torch.cuda.is_available() and config.engine.device.startswith("cuda")
    return {
        "fedensemble": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": torch.get_num_threads(),
        "command": sys.argv[1:],
    }


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


def simulated(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The clock after these rounds, and in how many nobody answered; empty where no time is simulated."""
    if "clock" not in records[-1]:
        return {}
    return {"clock": records[-1]["clock"], "unanswered": sum(record["loss"] is None for record in records)}


def sum_up(config: Config, store: RunFolder, federation: Federation) -> dict[str, Any]:
    """What is left of a run at its end: the last test, and what all rounds come to."""
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
        "prediction_models": federation.ensemble.prediction_models,
        "prediction_bytes": federation.ensemble.prediction_bytes,
        "seconds": round(federation.seconds, 3),
        "combine": federation.ensemble.combine,
        **simulated(records),
        **{key: value for key, value in records[-1].items() if key.startswith("test")},
    }
