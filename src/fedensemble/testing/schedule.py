"""The contract of a schedule."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from ..core.schedule import Schedule
from ..core.types import Plan, VisitReports
from ..errors import InputError
from .assertions import require, require_equal, snapshot

# Clients, modes, strata, clients per round. The settings include strata that divide neither clients
# nor clients per round, and rounds with all clients.
_SETTINGS = (
    (12, 3, 4, 8),
    (13, 4, 5, 7),
    (10, 1, 1, 3),
    (9, 3, 3, 9),
    (20, 4, 2, 6),
    (5, 5, 5, 5),
    (15, 2, 10, 10),
)
_AGES = 150
# Over 150 ages a mode has 450 visits or more. If visits were independent, its share would have a
# standard deviation of 5 %; because clients of a stratum move together, it is at most twice that. A
# deviation of 25 % is therefore not chance.
_FAIR_TO_MODES = 1.25
# Standard errors by which a client's rate may differ from the mean. About 300 rates are checked, so
# a fair schedule fails for one in 10^5 seeds, and the seeds are fixed.
_ERRORS = 5.5


def check_schedule(schedule: type[Schedule]) -> None:
    """Raises AssertionError if the schedule breaks a contract; the message names the contract.

    A round has `clients_per_round` visits. If a client may train several modes in a round
    (`one_mode_per_client` is False), every mode has that many visits.

    Args:
        schedule: a class that is built with `modes`, `strata` and `clients_per_round`.
    """
    accepted = 0
    for population, modes, strata, per_round in _SETTINGS:
        candidate = schedule(modes=modes, strata=strata, clients_per_round=per_round)
        try:
            candidate.init(population, seed=0)
        except InputError:
            continue  # a schedule may need other settings and raise
        accepted += 1
        check_plans(candidate, population)
        check_purity(candidate, population)
        check_fairness(candidate, population)
    require(
        accepted > 0,
        f"{schedule.__name__} rejects every ordinary setting: {_SETTINGS} (N, K, Q, M).",
    )


def check_plans(schedule: Schedule, population: int) -> None:
    """Checks that every plan is well formed."""
    name = _name(schedule, population)
    visits = schedule.clients_per_round * (1 if schedule.one_mode_per_client else schedule.modes)
    for seed, round in product(range(3), range(3 * schedule.modes)):
        plan = schedule.plan(schedule.init(population, seed), round)
        where = f"{name}, seed {seed}, round {round}"
        for what, values in plan.tensors().items():
            require(
                values.dtype == torch.int64 and values.dim() == 1,
                f"{where}: {what} must be int64 [J].",
            )
            require(
                len(values) == visits,
                f"{where}: a plan must have {visits} visits; {what} has {len(values)}.",
            )
        clients, modes = plan.client.tolist(), plan.mode.tolist()
        require(
            min(clients) >= 0 and max(clients) < population,
            f"{where}: a client is outside 0 .. {population - 1}.",
        )
        require(
            min(modes) >= 0 and max(modes) < schedule.modes,
            f"{where}: a mode is outside 0 .. {schedule.modes - 1}.",
        )
        require(
            clients == sorted(clients), f"{where}: visits must be sorted by client; got {clients}."
        )
        pairs = set(zip(clients, modes, strict=True))
        require(len(pairs) == visits, f"{where}: a client is given the same mode twice.")
        if schedule.one_mode_per_client:
            require(len(set(clients)) == visits, f"{where}: a client has two modes in one round.")


def check_purity(schedule: Schedule, population: int) -> None:
    """Checks that a plan depends on state and round alone, and that the seed matters."""
    name, rounds = _name(schedule, population), range(3 * schedule.modes)
    state = schedule.init(population, seed=1)
    tensors = isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())
    require(
        tensors, f"{name}: the state must be a dict of tensors, or a checkpoint cannot hold it."
    )
    before = snapshot(state)
    forwards = [schedule.plan(state, round) for round in rounds]
    backwards = [schedule.plan(state, round) for round in reversed(rounds)][::-1]
    copied = [schedule.plan({n: t.clone() for n, t in state.items()}, round) for round in rounds]
    require_equal(snapshot(state), before, f"{name}: plan wrote into the state")
    again = schedule.init(population, seed=1)
    require_equal(again, state, f"{name}: the same seed gave another state")
    fresh = [schedule.plan(again, round) for round in rounds]
    for first, *others in zip(forwards, backwards, copied, fresh, strict=True):
        same = all(_values(first) == _values(other) for other in others)
        require(
            same,
            f"{name}: plan is not a function of state and round alone; "
            "it gave two plans for one round.",
        )
    ones = torch.ones(len(forwards[0].client), dtype=torch.float64)
    if schedule.needs_reports:
        reports = VisitReports(ones, ones, ones, round=schedule.modes - 1)
        observed = schedule.observe(state, forwards[0], ones.float(), reports)
    else:
        observed = schedule.observe(state, forwards[0], ones.float())
    require_equal(snapshot(state), before, f"{name}: observe wrote into the state")
    forms = [{n: (t.shape, t.dtype) for n, t in tree.items()} for tree in (state, observed)]
    require(
        forms[0] == forms[1],
        f"{name}: observe changed the form of the state from {forms[0]} to {forms[1]}.",
    )
    # If all clients train in every round, there may be nothing to draw.
    if schedule.clients_per_round < population:
        different = _plans(schedule, population, seed=1) != _plans(schedule, population, seed=2)
        require(different, f"{name}: different seeds give the same plans.")


def check_fairness(schedule: Schedule, population: int) -> None:
    """Checks that over many ages all clients, and all modes of a client, have equal shares.

    If the schedule declares that it prefers some clients, every client must only train every mode.
    """
    name, modes = _name(schedule, population), schedule.modes
    state = schedule.init(population, seed=2)
    visits = torch.zeros(_AGES, population, modes, dtype=torch.float64)
    for round in range(_AGES * modes):
        plan: Plan = schedule.plan(state, round)
        visits[round // modes].index_put_(
            (plan.client, plan.mode),
            torch.ones(len(plan.client), dtype=visits.dtype),
            accumulate=True,
        )
    totals = visits.sum((0, 1))
    share = totals / totals.mean()
    for worst in (int(share.argmin()), int(share.argmax())):
        require(
            1 / _FAIR_TO_MODES < float(share[worst]) < _FAIR_TO_MODES,
            f"{name}: over {_AGES} ages mode {worst} has {int(totals[worst])} visits where the "
            f"mean is {float(totals.mean()):.0f}; modes must be treated alike.",
        )
    if schedule.uniform:
        _check_rates(visits.sum(2), modes, f"{name}: client {{0}} is selected")
        _check_rates(visits.flatten(1), modes, f"{name}: client {{0}} trains mode {{1}}", modes)
    missed = torch.nonzero(visits.sum(0) == 0).tolist()
    require(
        not missed,
        f"{name}: over {_AGES} ages client {missed and missed[0][0]} never trained some mode.",
    )


def _check_rates(visits: Tensor, rounds: int, what: str, columns: int = 1) -> None:
    """Raises unless all columns of visits per age, [ages, C], have the same mean up to chance.

    The standard error is that over ages, because rounds of an age may depend on each other, or that
    of independent rounds if it is larger: a client that is selected equally often in every age has
    no variance over ages at all.
    """
    rate, ages = visits / rounds, len(visits)
    mean = float(rate.mean())
    error = (
        torch.maximum(rate.std(0), torch.tensor(max(mean * (1 - mean), 0.0) / rounds).sqrt())
        / ages**0.5
    )
    by_column = rate.mean(0)
    deviation = (by_column - mean).abs()
    worst = int((deviation - _ERRORS * error).argmax())
    who = what.format(worst // columns, worst % columns)
    require(
        bool(deviation[worst] <= _ERRORS * error[worst] + 1e-9),
        f"{who} in {100 * float(by_column[worst]):.1f} % of {ages * rounds} rounds where the mean "
        f"is {100 * mean:.1f} %. Clients must be treated alike, or FedAvg's fixed point moves "
        "towards some of them; a schedule that prefers clients on purpose sets uniform = False.",
    )


def _plans(schedule: Schedule, population: int, seed: int) -> list[dict[str, list[int]]]:
    state = schedule.init(population, seed)
    return [_values(schedule.plan(state, round)) for round in range(2 * schedule.modes)]


def _values(plan: Plan) -> dict[str, list[int]]:
    return {name: value.tolist() for name, value in plan.tensors().items()}


def _name(schedule: Schedule, population: int) -> str:
    return (
        f"{type(schedule).__name__}(modes={schedule.modes}, strata={schedule.strata}, "
        f"clients_per_round={schedule.clients_per_round}) on {population} clients"
    )
