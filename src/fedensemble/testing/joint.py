"""The contract of an algorithm with joint visits, see `core/visits/joint.py`.

Its modes meet on the client, so that they cannot be kept apart. Instead, the order of the modes
must not matter, and the bytes of a visit must grow with their number.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..federation.federation import Federation
from .assertions import require, require_close
from .toy_problems import small_federation, train


def check_joint_visits(algorithm: Algorithm, engine: str, modes: int, strata: int) -> None:
    """Checks that the order of modes does not matter, and that all of them are downloaded."""
    name, rounds = f"{type(algorithm).__name__}, engine '{engine}'", 5
    order = torch.arange(modes).roll(1)
    run = small_federation(algorithm, engine, modes, strata)
    other = small_federation(algorithm, engine, modes, strata)
    theta = other.state.modes["theta"]
    if bool((theta == theta[:1]).all()):  # modes that start equal have no order yet
        order = torch.arange(modes)
    theta = theta[order]
    other.state = replace(other.state, modes=other.algorithm.init_mode(theta))
    train(run, rounds)
    train(other, rounds)
    expected = {key: value[order] for key, value in run.state.modes.items()}
    require_close(other.state.modes, expected, f"{name}: the order of the modes changed a result")
    weights, reordered = (_weights(each) for each in (run, other))
    require_close(
        {"weights": reordered},
        {"weights": weights[:, order]},
        f"{name}: the order of the modes changed the weights of clients",
    )
    require(
        bool((weights >= 0).all()) and bool(((weights.sum(1) - 1).abs() < 1e-12).all()),
        f"{name}: the weights of a client are not negative and sum to 1; got {weights.tolist()}.",
    )
    one, several = (_first_download(algorithm, engine, count) for count in (1, modes))
    require(
        several == modes * one,
        f"{name}: a first visit downloads {several} bytes with {modes} modes, and {one} with one.",
    )


def _weights(federation: Federation) -> Tensor:
    return federation.personal_weights(range(len(federation.data)))


def _first_download(algorithm: Algorithm, engine: str, modes: int) -> int:
    federation = small_federation(algorithm, engine, modes, 1)
    report = next(federation.rounds(1))
    return report.bytes_down // len(report.plan.client)
