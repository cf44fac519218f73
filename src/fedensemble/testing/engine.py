"""The contract of an engine: it agrees with 'loop' on models and settings of every kind."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..algorithms import FedAvg
from ..core.algorithm import Algorithm
from ..core.participation import Everybody, Participation
from ..core.problem import LocalProblem
from ..core.types import Cohort, Plan
from ..errors import EngineWarning
from ..federation.federation import Federation
from ..flat_params import Tree
from ..schedules import Stratified
from .assertions import remembered, require, require_close, require_equal, snapshot
from .cases import CASES, Case

_ROUNDS = 3
_EVERYBODY = Everybody()


@dataclass(frozen=True, kw_only=True)
class _Stateful(Algorithm):
    """A method for checks only: it has server state and client state, so that both are used."""

    def init_mode(self, theta: Tensor) -> Tree:
        return {"theta": theta, "pace": torch.zeros_like(theta)}

    def init_client_state(self, theta: Tensor) -> Tree:
        return {"last": torch.zeros_like(theta), "visits": torch.zeros_like(theta[..., :1])}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        theta = problem.descend(
            sent["theta"], lambda theta, gradient: gradient + 0.1 * memory["last"]
        )
        change = theta - sent["theta"]
        return {"change": change}, {"last": change, "visits": memory["visits"] + 1}

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        pace = 0.5 * mode["pace"] + uploads["change"]
        return {"theta": mode["theta"] + pace, "pace": pace}


def check_engine(name: str, **options: Any) -> None:
    """Raises AssertionError if the engine breaks a contract; it names the contract and the model.

    Args:
        name: a registered engine.
        options: engine options, such as `block` for "vector".
    """
    check_inputs(name, options)
    check_cohort(name, options)
    check_empty_round(name, options)
    check_memory(name, options)
    check_partial_work(name, options)
    for case in CASES:
        check_case(name, case, options)


def check_case(name: str, case: Case, options: dict[str, Any]) -> None:
    """Checks weights, running statistics, losses and bytes of one case against 'loop'."""
    got, reference = _federation(name, case, options), _federation("loop", case, {})
    start = reference.state
    what = f"Engine '{name}' disagrees with 'loop' on {case.name}"
    for report, expected in zip(got.rounds(_ROUNDS), reference.rounds(_ROUNDS), strict=True):
        require_close(
            {"losses": report.losses}, {"losses": expected.losses}, f"{what}, round {report.round}"
        )
        costs = [(each.bytes_up, each.bytes_down) for each in (report, expected)]
        require(costs[0] == costs[1], f"{what}: bytes up and down are {costs[0]}, not {costs[1]}.")
    require_close(got.state.modes, reference.state.modes, what)
    require_close({"buffers": got.state.buffers}, {"buffers": reference.state.buffers}, what)
    for federation in (got, reference):
        case.check(federation, start)


def check_memory(name: str, options: dict[str, Any]) -> None:
    """Checks client state against that of 'loop', also after it was saved and loaded."""
    case = CASES[0]
    algorithm = _Stateful(lr=0.1)
    got, reference = (
        _federation(n, case, o, algorithm) for n, o in ((name, options), ("loop", {}))
    )
    for federation in (got, reference):
        for _ in federation.rounds(_ROUNDS):
            pass
    what = f"Engine '{name}' disagrees with 'loop' on a method with client memory"
    require_close(got.state.modes, reference.state.modes, what)
    require_close(remembered(got.engine), remembered(reference.engine), what)
    restored = _federation(name, case, options, algorithm)
    restored.restore(snapshot_of(got), got.round)
    require_equal(
        restored.tensors(), got.tensors(), f"Engine '{name}' loses client memory when it is loaded"
    )
    for federation in (got, restored):
        next(federation.rounds(1))
    require_equal(
        restored.tensors(),
        got.tensors(),
        f"Engine '{name}' goes on differently after client memory is loaded",
    )


def check_partial_work(name: str, options: dict[str, Any]) -> None:
    """Checks that visits have the local steps that the plan asks for."""
    algorithm, late = _Stateful(lr=0.1), Everybody(stragglers=0.7)
    got, reference = (
        _federation(n, CASES[0], o, algorithm, late) for n, o in ((name, options), ("loop", {}))
    )
    what = f"Engine '{name}' disagrees with 'loop' on visits that stop early, `plan.steps`"
    for report, expected in zip(got.rounds(_ROUNDS), reference.rounds(_ROUNDS), strict=True):
        require_close({"losses": report.losses}, {"losses": expected.losses}, what)
    require_close(got.state.modes, reference.state.modes, what)
    require_close(remembered(got.engine), remembered(reference.engine), what)


def check_cohort(name: str, options: dict[str, Any]) -> None:
    """Checks that the cohort has the round and its learning rate."""
    federation = _federation(
        name, CASES[0], options, FedAvg(lr=0.1, lr_decay=0.5, lr_decay_every=2)
    )
    state, algorithm = federation.state, federation.algorithm
    for round in (0, 3):
        plan = federation.schedule.plan(state.schedule, round)
        cohort = federation.engine.run_visits(
            algorithm, algorithm.broadcast(state.modes), state.buffers, plan, round
        ).cohort
        require(
            (cohort.round, cohort.lr) == (round, algorithm.learning_rate(round)),
            f"Engine '{name}' must fill in the cohort's round and lr, {round} and "
            f"{algorithm.learning_rate(round)}; got {cohort.round} and {cohort.lr}.",
        )


def check_empty_round(name: str, options: dict[str, Any]) -> None:
    """Checks a round without visits: no losses, no bytes, the same statistics and client state."""
    empty_plan = Plan(*(torch.empty(0, dtype=torch.int64) for _ in range(2)))
    for case in (case for case in CASES if case.name in ("MLP", "BatchNorm")):
        federation = _federation(name, case, options, _Stateful(lr=0.1))
        next(federation.rounds(1))
        state, memory = federation.state, snapshot(federation.engine.client_state_tensors())
        sent = federation.algorithm.broadcast(state.modes)
        returned = federation.engine.run_visits(
            federation.algorithm, sent, state.buffers, empty_plan, 1
        )
        what = f"Engine '{name}' handles a round without visits wrongly ({case.name})"
        require(len(returned.loss) == len(returned.bytes_up) == len(returned.bytes_down) == 0, what)
        require(not bool(returned.cohort.count.any()), what)
        require_equal({"buffers": returned.buffers}, {"buffers": state.buffers}, what)
        require_equal(snapshot(federation.engine.client_state_tensors()), memory, what)


def check_inputs(name: str, options: dict[str, Any]) -> None:
    """Checks that the engine does not write into its inputs."""
    for case in (case for case in CASES if case.name in ("MLP", "BatchNorm")):
        federation = _federation(name, case, options)
        state = federation.state
        sent = federation.algorithm.broadcast(state.modes)
        inputs = {**sent, "buffers": state.buffers, "x": federation.data.x, "y": federation.data.y}
        before = snapshot(inputs)
        federation.engine.run_visits(
            federation.algorithm,
            sent,
            state.buffers,
            federation.schedule.plan(state.schedule, 0),
            0,
        )
        require_equal(
            snapshot(inputs), before, f"Engine '{name}' wrote into what it was given ({case.name})"
        )


def snapshot_of(federation: Federation) -> Tree:
    """Copies of everything that training changes."""
    return {name: tensor.clone() for name, tensor in federation.tensors().items()}


def _federation(
    name: str,
    case: Case,
    options: dict[str, Any],
    algorithm: Algorithm | None = None,
    participation: Participation = _EVERYBODY,
) -> Federation:
    data = case.data()
    settings: dict[str, Any] = {"batch_size": 3, "loss": "cross_entropy", **case.settings}
    method = algorithm or FedAvg(lr=0.1, optimizer=case.optimizer)
    schedule = Stratified(modes=2, strata=2, clients_per_round=len(data) - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineWarning)  # slow fallbacks must be correct as well
        return Federation(
            case.model,
            data,
            method,
            schedule=schedule,
            engine=name,
            engine_options=options,
            participation=participation,
            dtype=torch.float64,
            **settings,
        )
