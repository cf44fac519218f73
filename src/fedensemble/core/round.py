"""One communication round of Fed-ensemble: the paper's Algorithm 1, lines 5 to 15."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DivergedError
from ..flat_params import Tree
from .aggregator import MEAN, Aggregator, aggregate
from .algorithm import Algorithm
from .engine import Engine
from .schedule import Schedule
from .types import EnsembleState, Outcome, Plan, RoundReport, RoundResult


class Request(NamedTuple):
    """What the server asks of an engine in a round."""

    algorithm: Algorithm
    sent: Tree  # [K, P]
    buffers: Tensor  # [K, R]
    plan: Plan
    round: int  # counted from 0


def run_round(
    state: EnsembleState,
    *,
    algorithm: Algorithm,
    schedule: Schedule,
    engine: Engine,
    aggregator: Aggregator = MEAN,
) -> tuple[EnsembleState, RoundReport]:
    """The state after one more round, and what happened in it."""
    request = start_round(state, algorithm, schedule)
    done = finish_round(state, request, engine.visit(*request), schedule, aggregator=aggregator)
    instead = engine.review(state, done[0])
    if instead is not None:
        done = finish_round(state, request, instead, schedule, aggregator=aggregator)
    engine.commit()  # a round that fails leaves no trace: all stays as it was before it
    return done


def start_round(
    state: EnsembleState, algorithm: Algorithm, schedule: Schedule, outcome: Outcome | None = None
) -> Request:
    """Who trains which mode, and what they are sent; with an outcome, only whose answers will
    count.
    """
    plan = schedule.plan(state.schedule, state.round) if outcome is None else outcome.plan
    return Request(algorithm, algorithm.broadcast(state.modes), state.buffers, plan, state.round)


def finish_round(
    state: EnsembleState,
    request: Request,
    returned: RoundResult,
    schedule: Schedule,
    outcome: Outcome | None = None,
    aggregator: Aggregator = MEAN,
) -> tuple[EnsembleState, RoundReport]:
    """The server's step: every mode from the clients that trained it; nothing but the time if
    nobody did.
    """
    plan = returned.answered or request.plan
    after, turnout = (
        (state.participation, None) if outcome is None else (outcome.state, outcome.turnout)
    )
    losses = returned.loss.detach().cpu()
    down = int(returned.bytes_down.sum()) if turnout is None else turnout.bytes_down
    age = state.round // schedule.modes + 1
    if not len(plan.client):
        new = replace(state, round=state.round + 1, participation=after)
        return new, RoundReport(new.round, age, plan, None, losses, 0, down, (), turnout)
    check_finite(losses, returned, plan, state.round)
    if aggregator.gathers:
        returned = aggregate(aggregator, request.algorithm, request.sent, request.buffers, returned)
    updated = request.algorithm.server_update(state.modes, returned.uploads, returned.cohort)

    trained = sorted(set(plan.mode.tolist()))
    modes = {name: updated[name].expand_as(kept).contiguous() for name, kept in state.modes.items()}
    buffers = returned.buffers
    # a mode nobody trained keeps its weights and its server state
    if len(trained) < schedule.modes:
        there = returned.cohort.count > 0
        modes = {name: torch.where(there, modes[name], kept) for name, kept in state.modes.items()}
        buffers = torch.where(there, buffers, state.buffers)
    new = EnsembleState(
        round=state.round + 1,
        modes=modes,
        buffers=buffers,
        schedule=schedule.observe(state.schedule, plan, returned.loss),
        participation=after,
    )
    report = RoundReport(
        round=new.round,
        age=age,
        plan=plan,
        loss=float(losses.mean()),
        losses=losses,
        bytes_up=int(returned.bytes_up.sum()),
        bytes_down=down,
        trained=tuple(trained),
        turnout=turnout,
    )
    return new, report


def check_finite(losses: Tensor, returned: RoundResult, plan: Plan, round: int) -> None:
    """Raises if a visit diverged, naming the first one.

    A fleet never comes to that: its engine refuses such an answer, for no client may end
    everybody's training.
    """
    bad = torch.nonzero(~torch.isfinite(losses)).flatten()
    if len(bad):
        j = int(bad[0])
        others = f" ({len(bad) - 1} more visits likewise)" if len(bad) > 1 else ""
        raise DivergedError(
            f"loss became {float(losses[j])} at round {round + 1}, client {int(plan.client[j])}, "
            f"mode {int(plan.mode[j])} (step {int(returned.first_bad_step[j]) + 1}){others}. "
            "Lower algorithm.lr, or set algorithm.optimizer.clip."
        )
