"""One communication round of Fed-ensemble: lines 5 to 15 of Algorithm 1 in the paper.

`run_round` is the only round loop: `Federation`, runs that train in one batch and the Flower server
all call it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DivergedError, setting
from ..flat_params import Tree
from .aggregator import MEAN, STATISTICS, Aggregator, aggregate
from .algorithm import Algorithm, algorithms
from .average import NO_AVERAGE, Average, update_average
from .engine import Engine
from .parameters.shared import Shared
from .schedule import Schedule
from .types import Cohort, EnsembleState, Outcome, Plan, RoundReport, RoundResult
from .visits.joint import join_modes, join_plan, split_result
from .visits.partial_work import check_steps
from .visits.visit_reports import reports_of


class Request(NamedTuple):
    """The arguments of `Engine.run_visits`: the work that the server requests in a round."""

    algorithm: Algorithm
    sent: Tree  # [K, P]
    buffers: Tensor  # [K, R]
    plan: Plan
    round: int  # counted from 0

    # If the algorithm has joint visits, the K modes are one wide mode: `sent` is [1, K * P],
    # `buffers` [1, K * R], and the plan's visits are to mode 0.


def run_round(
    state: EnsembleState,
    *,
    algorithm: Algorithm,
    schedule: Schedule,
    engine: Engine,
    aggregator: Aggregator = MEAN,
    average: Average = NO_AVERAGE,
    outcome: Outcome | None = None,
    request: Request | None = None,
    train_clients: Callable[[Request], RoundResult] | None = None,
    shared: Shared | None = None,
) -> tuple[EnsembleState, RoundReport]:
    """Runs one round; returns the next state and a report.

    Args:
        outcome: the visits whose replies count, if participation is simulated.
        request: the result of `start_round`, if the caller has computed it already.
        train_clients: trains the clients of a request; by default the engine's `run_visits`. Runs
            that train in one batch pass their part of the batch's result.
        shared: the parameters that all modes have in common; None if there are none.
    """
    # The schedule assigns modes to clients; the server sends each client its mode.
    if request is None:
        request = start_round(state, algorithm, schedule, outcome)
    # The clients train. The result holds each mode's weighted mean upload.
    result = engine.run_visits(*request) if train_clients is None else train_clients(request)
    # The server updates each mode from the uploads of its clients.
    done = finish_round(state, request, result, schedule, outcome, aggregator, shared)
    # The engine may reject an upload that spoils the update, and return the mean of the others.
    corrected = engine.review(state, done[0])
    if corrected is not None:
        done = finish_round(state, request, corrected, schedule, outcome, aggregator, shared)
    new, report = done
    # Modes may interact. This is after the review, so that a mode that broke does not spread.
    if algorithm.couples and report.trained:
        new = couple_modes(new, algorithm, (corrected or result).cohort, engine)
    # A server step on gathered uploads may depend on a device's free memory, and so differ between
    # the processes of a job. All of them continue with the modes of rank 0.
    elif algorithm.gathers_uploads(request.sent):
        new = broadcast_modes(new, engine)
    # Modes without clients change, too, if they share parameters or interact with trained ones.
    everyone = report.trained and (shared is not None or algorithm.couples)
    changed = tuple(range(schedule.modes)) if everyone else report.trained
    lr = algorithm.learning_rate(state.round)
    new = replace(new, average=update_average(average, new, changed, lr))
    # Client state is written last: a round that raises changes neither server nor client state.
    engine.commit()
    return new, report


def start_round(
    state: EnsembleState, algorithm: Algorithm, schedule: Schedule, outcome: Outcome | None = None
) -> Request:
    """The request for the next round: the plan and what each mode's clients receive.

    Args:
        outcome: if given, its plan is used: only the visits whose replies will count.
    """
    plan = schedule.plan(state.schedule, state.round) if outcome is None else outcome.plan
    check_steps(plan)
    sent, buffers = algorithm.broadcast(state.modes), state.buffers
    if algorithm.joint:
        sent, plan = join_modes(sent), join_plan(plan)
        buffers = buffers.reshape(1, -1)
    return Request(algorithm, sent, buffers, plan, state.round)


def finish_round(
    state: EnsembleState,
    request: Request,
    result: RoundResult,
    schedule: Schedule,
    outcome: Outcome | None = None,
    aggregator: Aggregator = MEAN,
    shared: Shared | None = None,
) -> tuple[EnsembleState, RoundReport]:
    """The server's step: updates each mode from the uploads of its clients.

    If no client replied, only the round number and the participation's state change.
    """
    plan = result.answered or request.plan
    participation, turnout = (
        (state.participation, None) if outcome is None else (outcome.state, outcome.turnout)
    )
    losses = result.loss.detach().cpu()
    bytes_down = int(result.bytes_down.sum()) if turnout is None else turnout.bytes_down
    age = state.round // schedule.modes + 1
    if not len(plan.client):
        new = replace(state, round=state.round + 1, participation=participation)
        return new, RoundReport(new.round, age, plan, None, losses, 0, bytes_down, (), turnout)

    check_losses_finite(losses, result, plan, state.round)
    algorithm, sent, per_mode = request.algorithm, request.sent, result
    if aggregator.gathers:
        per_mode = aggregate(aggregator, algorithm, sent, request.buffers, result)
    if algorithm.joint:
        if per_mode.cohort.members is not None:
            per_mode = algorithm.reassign(request.buffers, per_mode)
        per_mode = split_result(per_mode, request.buffers, schedule.modes)
        trained = torch.nonzero(per_mode.cohort.count[:, 0] > 0).flatten().tolist()
    else:
        trained = sorted(set(plan.mode.tolist()))
    modes, buffers = update_modes(state, algorithm, per_mode, len(trained) < schedule.modes)
    if shared is not None:
        modes, buffers = shared.update(state, modes, buffers, algorithm, sent, result, aggregator)
    new = replace(
        state,
        round=state.round + 1,
        modes=modes,
        buffers=buffers,
        schedule=_observe(schedule, state, plan, losses, result),
        participation=participation,
    )
    report = RoundReport(
        round=new.round,
        age=age,
        plan=plan,
        loss=float(losses.mean()),
        losses=losses,
        bytes_up=int(result.bytes_up.sum()),
        bytes_down=bytes_down,
        trained=tuple(trained),
        turnout=turnout,
    )
    return new, report


def _observe(
    schedule: Schedule, state: EnsembleState, plan: Plan, losses: Tensor, result: RoundResult
) -> Tree:
    """The schedule's state after a round."""
    if not schedule.needs_reports:
        return schedule.observe(state.schedule, plan, losses)
    reports = reports_of(result, schedule, state.round)
    return schedule.observe(state.schedule, plan, losses, reports)


def update_modes(
    state: EnsembleState, algorithm: Algorithm, result: RoundResult, some_idle: bool
) -> tuple[Tree, Tensor]:
    """Server state [K, P] and running statistics [K, R] of all modes, each from its own clients.

    Args:
        some_idle: whether some mode had no client. Such a mode keeps its state unchanged; only
            `Algorithm.couple`, which follows, may change it.
    """
    updated = algorithm.server_update(state.modes, result.uploads, result.cohort)
    modes = {name: updated[name].expand_as(old).contiguous() for name, old in state.modes.items()}
    if not some_idle:
        return modes, result.buffers
    has_clients = result.cohort.count > 0
    modes = {name: torch.where(has_clients, modes[name], old) for name, old in state.modes.items()}
    return modes, torch.where(has_clients, result.buffers, state.buffers)


def couple_modes(
    state: EnsembleState, algorithm: Algorithm, cohort: Cohort, engine: Engine
) -> EnsembleState:
    """The state after the modes have interacted; raises DivergedError if one is not finite.

    An engine of real clients does not let it raise, and gets the state without interaction.
    """
    modes, buffers = algorithm.couple(state.modes, state.buffers, cohort)
    modes = {name: modes[name].expand_as(old).contiguous() for name, old in state.modes.items()}
    buffers = buffers.expand_as(state.buffers).contiguous()
    # Coupling may compare modes, or train one. Different rounding on another process of a job could
    # then lead to another model, so all of them continue with the modes of rank 0.
    new = broadcast_modes(replace(state, modes=modes, buffers=buffers), engine)
    tensors = [*new.modes.values(), new.buffers]
    broken = torch.stack([~value.isfinite().all(1) for value in tensors]).any(0)
    if not bool(broken.any()):
        return new
    name = algorithms.name_of(type(algorithm.base)) or type(algorithm.base).__name__
    mode = int(torch.nonzero(broken)[0])
    engine.reject_coupling(
        DivergedError(
            f"The server's step of '{name}' gave nan or infinity in mode {mode} at round "
            f"{new.round}. Lower the learning rates in the table 'algorithm'."
        )
    )
    return state


def broadcast_modes(state: EnsembleState, engine: Engine) -> EnsembleState:
    """The state with the modes and running statistics of rank 0."""
    modes = engine.broadcast_state({**state.modes, STATISTICS: state.buffers})
    return replace(state, buffers=modes.pop(STATISTICS), modes=modes)


def check_losses_finite(losses: Tensor, result: RoundResult, plan: Plan, round: int) -> None:
    """Raises DivergedError if the loss of a visit is not finite, and names the first such visit.

    An upload that is not finite counts as such a loss: the engine then reports nan for the visit,
    see `summarize_losses`. A federation of real clients never reaches this error: its engine
    rejects such a reply, because no single client may end the training of all.
    """
    bad = torch.nonzero(~torch.isfinite(losses)).flatten()
    if len(bad):
        j = int(bad[0])
        others = f" ({len(bad) - 1} more visits diverged)" if len(bad) > 1 else ""
        raise DivergedError(
            f"loss became {float(losses[j])} at round {round + 1}, client {int(plan.client[j])}, "
            f"mode {int(plan.mode[j])} (step {int(result.first_bad_step[j]) + 1}){others}. "
            f"Lower {setting('algorithm.lr')}, or set {setting('algorithm.optimizer.clip')}."
        )
