"""Visits with fewer or more local steps than the config says, with every algorithm and engine."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble.algorithms import FedNova
from fedensemble.core.participation import Everybody
from fedensemble.core.types import Plan
from fedensemble.core.visits.batches import LocalWork, batch_table
from fedensemble.testing.assertions import remembered, require_close, require_equal
from fedensemble.testing.reference import without_ensemble
from fedensemble.testing.toy_problems import SIZES, numbers, small_federation, train

ROUNDS = 3
LATE = Everybody(stragglers=0.7)


@dataclass(frozen=True, kw_only=True)
class Hurried(fe.Stratified):
    """Asks for 1, 2, ... local steps, whatever the clients' sizes."""

    def plan(self, state, round):
        plan = super().plan(state, round)
        return plan._replace(steps=1 + torch.arange(len(plan.client)) + round)


@pytest.mark.parametrize("name", sorted(fe.algorithms))
def test_every_algorithm_on_both_engines(name):
    def make(engine, modes, strata):
        return small_federation(fe.algorithms[name](), engine, modes, strata, participation=LATE)

    loop, vector = (train(make(engine, 3, 2), ROUNDS) for engine in ("loop", "vector"))
    require_close(vector.state.modes, loop.state.modes, name)
    require_close(remembered(vector.engine), remembered(loop.engine), f"client state of {name}")
    expected, _ = without_ensemble(loop.algorithm, make("loop", 1, 1), ROUNDS)
    got = {n: value[0] for n, value in train(make("vector", 1, 1), ROUNDS).state.modes.items()}
    require_close(got, expected, f"{name} without an ensemble")


def least_squares(algorithm, engine="vector"):
    """Clients of unlike size with other solutions; every step sees all that a client has."""
    sizes = (7, 3, 5, 1, 9, 4, 6)
    clients = [(numbers(n, 2, word=i), numbers(n, 1, word=20 + i)) for i, n in enumerate(sizes)]
    return fe.Federation(
        lambda: nn.Linear(2, 1, bias=False),
        fe.FederatedData.from_clients(clients),
        algorithm,
        loss="mse",
        steps=6,
        batch_size=max(sizes),
        engine=engine,
        dtype=torch.float64,
        modes=3,
        strata=2,
        clients_per_round=5,
        participation=LATE,
    )


def fednova(made, lr, rounds):
    """FedNova in NumPy: the visits stop when the library's plan says so."""
    models, weights = made.state.modes["theta"].numpy().copy(), made.data.size.numpy()
    for round in range(rounds):
        plan = made.schedule.plan(made.state.schedule, round)
        plan = made.participation.limit_steps(plan, round, made.costs)
        for k in set(plan.mode.tolist()):
            visits = [j for j in range(len(plan.client)) if plan.mode[j] == k]
            p = weights[plan.client[visits]] / weights[plan.client[visits]].sum()
            taus, directions = plan.steps[visits].numpy(), []
            for i, tau in zip(plan.client[visits].tolist(), taus, strict=True):
                x, y = (part.numpy() for part in made.data.client(i))
                w = models[k].copy()
                for _ in range(tau):
                    w -= lr * 2 * x.T @ (x @ w - y[:, 0]) / len(x)
                directions.append((models[k] - w) / (lr * tau))
            models[k] -= lr * (p @ taus) * (p @ np.array(directions))
    return models


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_fednova_with_stragglers(engine):
    made = least_squares(FedNova(lr=0.1), engine)
    expected = fednova(made, 0.1, rounds=8)
    np.testing.assert_allclose(
        train(made, 8).state.modes["theta"].numpy(), expected, rtol=0, atol=1e-10
    )
    plain = train(least_squares(fe.FedAvg(lr=0.1), engine), 8)
    assert np.abs(plain.state.modes["theta"].numpy() - expected).max() > 1e-3


def test_fednova_without_stragglers_is_fedavg():
    """All clients take the same number of steps."""

    def run(algorithm):
        return train(small_federation(algorithm, "vector", 3, 2, epochs=1, steps=4), ROUNDS)

    for optimizer in (fe.SGD(), fe.SGD(momentum=0.9), fe.Adam()):
        nova, plain = (kind(lr=0.05, optimizer=optimizer) for kind in (FedNova, fe.FedAvg))
        require_close(run(nova).state.modes, run(plain).state.modes, f"FedNova with {optimizer}")


def test_a_loaded_run_has_the_same_stragglers(tmp_path):
    def make():
        return small_federation(fe.Scaffold(), "vector", 2, 2, participation=LATE)

    whole = train(make(), 4)
    train(make(), 2).save(tmp_path)
    first = make()
    loaded = fe.Federation.load(
        tmp_path, model=first.model.factory, data=first.data, schedule=first.schedule
    )
    assert loaded.participation == LATE
    require_equal(train(loaded, 2).tensors(), whole.tensors(), "a loaded run")


def test_stragglers_do_as_many_steps_as_the_plan_says():
    """Visits to modes of their own are as long as a run with this number of steps for all."""
    made = small_federation(fe.FedAvg(), "vector", 4, 4, participation=LATE)
    start, report = made.state.modes["theta"].clone(), next(made.rounds(1))
    full = LocalWork(epochs=2, batch_size=3).count(torch.tensor(SIZES))[report.plan.client]
    assert bool((report.plan.steps <= full).all()) and bool((report.plan.steps < full).any())
    alone = [k for k in range(4) if int((report.plan.mode == k).sum()) == 1]
    assert alone
    for k in alone:
        j = int(torch.nonzero(report.plan.mode == k))
        same = small_federation(
            fe.FedAvg(), "loop", 4, 4, epochs=1, steps=int(report.plan.steps[j])
        )
        assert torch.equal(same.state.modes["theta"], start)
        train(same, 1)
        torch.testing.assert_close(
            same.state.modes["theta"][k], made.state.modes["theta"][k], rtol=0, atol=1e-12
        )


def test_the_loss_of_a_straggler_is_that_of_its_own_steps():
    none = small_federation(fe.FedAvg(), "loop", 2, 2, steps=1, epochs=1)
    early = small_federation(
        fe.FedAvg(), "vector", 2, 2, schedule=AllStop(modes=2, strata=2, clients_per_round=4)
    )
    one, other = next(none.rounds(1)), next(early.rounds(1))
    torch.testing.assert_close(other.losses, one.losses, rtol=0, atol=1e-12)


@dataclass(frozen=True, kw_only=True)
class AllStop(fe.Stratified):
    """Asks for a single local step."""

    def plan(self, state, round):
        plan = super().plan(state, round)
        return plan._replace(steps=torch.ones_like(plan.client))


@pytest.mark.parametrize("options", [{}, {"block": 2}], ids=["one block", "small blocks"])
def test_a_schedule_may_ask_for_more_steps_than_the_config(options):
    schedule = Hurried(modes=2, strata=2, clients_per_round=4)
    loop, vector = (
        train(
            small_federation(
                fe.Scaffold(lr=0.05), engine, 2, 2, schedule=schedule, epochs=1, **settings
            ),
            ROUNDS,
        )
        for engine, settings in (("loop", {}), ("vector", {"engine_options": options}))
    )
    require_close(vector.state.modes, loop.state.modes, "steps that a schedule asks for")


def test_fedprox_passes_its_stragglers_to_the_participation(tmp_path):
    made = small_federation(fe.FedProx(stragglers=0.7), "vector", 2, 2)
    other = small_federation(fe.FedProx(), "vector", 2, 2, participation=LATE)
    assert made.participation == LATE
    require_equal(train(made, 2).tensors(), train(other, 2).tensors(), "FedProx's option")
    devices = small_federation(fe.FedProx(stragglers=0.2), "loop", 2, 2, participation="devices")
    assert devices.participation == fe.Devices(stragglers=0.2)
    with pytest.raises(fe.InputError, match=r"stragglers.* is 0.7, and .*stragglers.* is 0.2"):
        small_federation(fe.FedProx(stragglers=0.2), "loop", 2, 2, participation=LATE)


def test_trained_together_with_a_run_without_stragglers():
    from fedensemble.engines.local.run_visits import run_visits

    def make(participation):
        return small_federation(fe.Scaffold(), "vector", 2, 2, participation=participation)

    made, expected = [make(LATE), make("everybody")], [make(LATE), make("everybody")]
    results = run_visits([f.engine for f in made], [f.next_request() for f in made])
    for together, alone, result in zip(made, expected, results, strict=True):
        together.run_round(result)
        train(alone, 1)
        require_close(together.state.modes, alone.state.modes, "runs that train together")


def test_steps_of_a_batch_table():
    sizes, work = torch.tensor([7, 2]), LocalWork(epochs=1, batch_size=3)
    _, weight = batch_table(torch.tensor([1, 2]), sizes, work, counts=torch.tensor([5, 1]))
    assert weight.sum(-1).T.tolist() == [[3, 3, 1, 3, 3], [2, 0, 0, 0, 0]]
    assert work.samples(sizes, torch.tensor([5, 1])).tolist() == [13, 2]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (torch.tensor([0, 1]), "1 to 1,000,000 local steps per visit; got 0 to 1"),
        (torch.tensor([1, 10**7]), "got 1 to 10000000"),
        (torch.tensor([1.0, 2.0]), "one int64 number"),
        (torch.tensor([1]), r"got \[1\] torch.int64 for 2 visits"),
    ],
)
def test_wrong_steps_of_a_schedule(steps, text):
    class Wrong(fe.Stratified):
        def plan(self, state, round):
            return Plan(torch.tensor([0, 1]), torch.tensor([0, 1]), steps)

    schedule = Wrong(modes=2, strata=2, clients_per_round=2)
    with pytest.raises(fe.InputError, match=text):
        train(small_federation(fe.FedAvg(), "vector", 2, 2, schedule=schedule), 1)


@pytest.mark.parametrize("rule", [Everybody, fe.Devices])
def test_bad_share(rule):
    with pytest.raises(fe.InputError, match=r"0 <= stragglers <= 1; got 1\.5"):
        rule(stragglers=1.5)


def test_devices_that_would_be_late_train_fewer_steps():
    """Their finishing times follow from the steps, and all reply in time unless one is too many."""
    devices = fe.Devices(compute_ms=1000, compute_spread=1.5, factor=1, deadline=6.0)
    whole = small_federation(fe.FedAvg(), "vector", 2, 2, participation=devices)
    partial = small_federation(
        fe.FedAvg(), "vector", 2, 2, participation=replace(devices, partial=True)
    )
    late = fewer = 0
    for before, after in zip(whole.rounds(8), partial.rounds(8), strict=True):
        full = partial.costs._work.count(partial.data.size[after.plan.client])
        assert bool((after.plan.steps <= full).all())
        fewer += int((after.plan.steps < full).sum())
        late += before.turnout.late
        # a device that cannot do one step in time is as late as before
        assert after.turnout.late <= before.turnout.late
        assert len(after.plan.client) >= len(before.plan.client)
        assert after.turnout.seconds <= 6.0
    assert late and fewer
    assert len(partial.history.records) == 8
