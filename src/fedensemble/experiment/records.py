"""What is said and written of a run: remarks, what it was carried out with, a record of each round,
a summary.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..algorithms import FedProx
from ..config.schema import Config
from ..core.algorithm import algorithms
from ..core.attack import attacks
from ..core.types import RoundReport
from ..federation.federation import Federation
from ..redact import redact
from ..runtime.hardware import processor
from ..version import VERSION
from .run_folder import RunFolder


def run_notes(federation: Federation) -> list[str]:
    """What a user should know of a run: an assumption of the method that does not hold, and the
    notes of its parts.
    """
    algorithm, schedule, clients = federation.algorithm, federation.schedule, len(federation.data)
    name, own = (
        algorithms.name_of(type(algorithm)) or type(algorithm).__name__,
        federation.data.x_server,
    )
    said = [*federation.data.notes, *schedule.notes, *federation.engine.notes, *algorithm.notes]
    said += [federation.aggregator_note] if federation.aggregator_note else []
    if federation.attack is not None and federation.malicious is not None:
        attack, count = type(federation.attack), int(federation.malicious.sum())
        name_of_attack = attacks.name_of(attack) or attack.__name__
        said.append(
            f"Simulated attack '{name_of_attack}': {count} of {clients} clients are malicious."
        )
    steps = int(federation.work.count(federation.data.size).max())
    if type(algorithm) is FedProx and algorithm.mu > 0 and steps == 1:
        said.insert(
            0,
            "With one local step FedProx is FedAvg: where a client starts, mu pulls nowhere. For more steps raise "
            "training.epochs or training.steps, or lower training.batch_size.",
        )
    if own is not None and not algorithm.distils:
        said.insert(0, f"{name} makes no use of the {len(own)} inputs that the server holds.")
    asked, modes = schedule.clients_per_round, schedule.modes
    shared = schedule.one_mode_a_client and modes > 1  # then no mode has all clients in a round
    if algorithm.assumes_full_participation and (asked < clients or shared):
        how = (
            f"with {asked} of {clients}"
            if asked < clients
            else f"with {modes} modes, of which a client trains one"
        )
        said.insert(
            0,
            f"{name} assumes that all clients take part in every round: {how}, the server goes by those who report, "
            "and the others keep what they remember.",
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
        "command": [redact(word) for word in sys.argv[1:]],
    }


def describe(report: RoundReport) -> dict[str, Any]:
    """A round as a record; without times but simulated ones, so that the same run gives the same
    bytes.
    """
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
            "asked": asked,
            "late": late,
            "dropped": dropped,
            "away": away,
            "round_seconds": seconds,
            "clock": clock,
        }
    return record


def simulated(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The clock after these rounds, and in how many nobody answered; empty where no time is
    simulated.
    """
    if not records or "clock" not in records[-1]:
        return {}
    return {
        "clock": records[-1]["clock"],
        "unanswered": sum(record["loss"] is None for record in records),
    }


def summarize(
    config: Config, store: RunFolder, federation: Federation, tested: Mapping[str, Any]
) -> dict[str, Any]:
    """What is left of a run at its end: the last test, and what all rounds come to.

    Args:
        tested: the record of the last round, or what a test of it gave.
    """
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
        "blocks": list(federation.engine.blocks),
        **(
            {"rounds_without_metrics": missing}
            if (missing := federation.round - len(records))
            else {}
        ),
        **simulated(records),
        **{key: value for key, value in tested.items() if key.startswith("test")},
    }
