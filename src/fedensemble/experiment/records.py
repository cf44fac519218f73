"""The records of a run: notes for the user, the environment, one record per round, the summary."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..algorithms import FedProx
from ..config.packages import find_packages
from ..config.schema import Config
from ..core.algorithm import algorithms
from ..core.attack import attacks
from ..core.engine import Engine
from ..federation.federation import Federation
from ..federation.history import describe as describe  # noqa: PLC0414
from ..redact import redact_command
from ..runtime.hardware import processor
from ..version import VERSION
from .storage.run_folder import RunFolder


def run_notes(federation: Federation) -> list[str]:
    """Returns notes for the user: assumptions of the algorithm that do not hold, notes of parts."""
    algorithm, schedule, clients = (
        federation.algorithm.base,
        federation.schedule,
        len(federation.data),
    )
    name = algorithms.name_of(type(algorithm)) or type(algorithm).__name__
    notes = [*federation.data.notes, *schedule.notes, *federation.engine.notes, *algorithm.notes]
    notes += [federation.aggregator_note] if federation.aggregator_note else []
    if federation.personal:
        notes.append(
            f"Parameters {', '.join(federation.personal)} are personal: tests use each client's "
            "own, and the saved modes have the initial ones. fedensemble personalize saves models "
            "of clients."
        )
    if federation.attack is not None and federation.malicious is not None:
        attack, count = type(federation.attack), int(federation.malicious.sum())
        attack_name = attacks.name_of(attack) or attack.__name__
        notes.append(
            f"Simulated attack '{attack_name}': {count} of {clients} clients are malicious."
        )
    steps = int(federation.work.count(federation.data.size).max())
    if type(algorithm) is FedProx and algorithm.mu > 0 and steps == 1:
        # The gradient of the proximal term is 0 at the starting point, the only one that is used.
        notes.insert(
            0,
            "With one local step FedProx is FedAvg: the proximal term has no effect at a client's "
            "starting point. For more steps raise training.epochs or training.steps, or lower "
            "training.batch_size.",
        )
    x_server = federation.data.x_server
    if x_server is not None and not algorithm.distils:
        notes.insert(0, f"{name} does not use the {len(x_server)} inputs of the server.")
    selected, modes = schedule.clients_per_round, schedule.modes
    # If each client trains one of several modes, no mode is trained by all clients in a round.
    modes_share_clients = schedule.one_mode_per_client and modes > 1
    if algorithm.assumes_full_participation and (selected < clients or modes_share_clients):
        setting = (
            f"with {selected} of {clients}"
            if selected < clients
            else f"with {modes} modes, of which each client trains one"
        )
        notes.insert(
            0,
            f"{name} assumes that all clients take part in every round: {setting}, the server "
            "uses only the clients that report, and the other clients keep their state.",
        )
    return notes


def environment(config: Config) -> dict[str, Any]:
    """Returns versions, platform, device and command line of the run."""
    cuda = torch.cuda.is_available() and config.engine.device.startswith("cuda")
    packages = find_packages(config.values())
    return {
        "fedensemble": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": torch.get_num_threads(),
        "command": redact_command(sys.argv[1:]),
        # packages of plug-ins, which a machine that predicts with this run needs, too
        **({"packages": packages} if packages else {}),
    }


def engine_facts(engine: Engine, ranks: int) -> dict[str, Any]:
    """Returns the numerical choices of an engine, for env.json."""
    return {"precision": engine.precision, "ranks": ranks, "blocks": list(engine.blocks)}


def simulated(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the simulated clock and the number of rounds without replies; {} without a clock."""
    if not records or "clock" not in records[-1]:
        return {}
    return {
        "clock": records[-1]["clock"],
        "unanswered": sum(record["loss"] is None for record in records),
    }


def summarize(
    config: Config,
    store: RunFolder,
    federation: Federation,
    metrics: Mapping[str, Any],
    calibration: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the summary of a finished run: the last test metrics, and totals over all rounds.

    The totals include the bytes of a calibration.

    Args:
        config: of the run.
        store: folder of the run.
        federation: after the last round.
        metrics: the record of the last round, or the result of `evaluate_run` after it.
        calibration: what `describe_calibration` returned; None if nothing was calibrated.
    """
    records, ensemble = store.metrics(), federation.ensemble
    missing = federation.round - len(records)  # records that were lost in a damaged metrics.jsonl
    summary = {
        "name": config.name,
        "hash": config.hash(),
        "rounds": federation.round,
        "modes": federation.schedule.modes,
        "parameters": federation.model.theta_layout.total,
        "task": federation.model.task,
        "bytes_up": sum(record["bytes_up"] for record in records),
        "bytes_down": sum(record["bytes_down"] for record in records),
        "prediction_models": ensemble.prediction_models,
        "prediction_bytes": ensemble.prediction_bytes,
        **({"frozen_bytes": ensemble.frozen_bytes} if ensemble.frozen_bytes else {}),
        "seconds": round(federation.seconds, 3),
        "trained_together": federation.trained_together,
        "combine": ensemble.combine,
        "blocks": list(federation.engine.blocks),
        **({"rounds_without_metrics": missing} if missing else {}),
        **simulated(records),
        **{key: value for key, value in metrics.items() if key.startswith("test")},
    }
    return with_calibration(summary, calibration)


def with_calibration(
    summary: Mapping[str, Any], calibration: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the summary of a run with another calibration, or with none, and its bytes."""
    before, after = summary.get("calibration") or {}, calibration or {}
    changed = {
        key: summary[key] - before.get(key, 0) + after.get(key, 0)
        for key in ("bytes_up", "bytes_down")
    }
    rest = {key: value for key, value in summary.items() if key != "calibration"}
    return {**rest, **changed, **({"calibration": dict(after)} if after else {})}
