"""Reports of visits, and the schedules that assign modes by them, against NumPy on both engines."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedensemble as fe
from fedensemble.core.types import Plan, VisitReports
from fedensemble.personal.clusters import recovered_share
from fedensemble.schedules import (
    Balanced,
    BestMode,
    ByGradient,
    ByGradientOncePerAge,
    WorstMode,
    WorstModeOncePerAge,
)
from fedensemble.schedules.best_mode import relative_losses
from fedensemble.schedules.by_gradient import divide_slots
from fedensemble.testing.assertions import require_equal
from fedensemble.testing.toy_problems import SIZES, classification, small_federation, train

ADAPTIVE = [BestMode, WorstMode, WorstModeOncePerAge, ByGradient, ByGradientOncePerAge]
ENGINES = pytest.mark.parametrize("engine", ["loop", "vector"])
KINDS = pytest.mark.parametrize("kind", ADAPTIVE, ids=lambda kind: kind.__name__)


def federation(kind, engine="vector", algorithm=None, **options):
    schedule = kind(modes=3, strata=2, clients_per_round=4)
    return small_federation(algorithm or fe.FedAvg(), engine, 3, 2, schedule=schedule, **options)


@ENGINES
@pytest.mark.parametrize("options", [{}, {"engine_options": {"block": 2}}], ids=["", "blocks"])
def test_reports(engine, options):
    """By autograd on all rows of each client, at the model that it received."""
    if engine == "loop":
        options = {}
    made = federation(WorstMode, engine, **options)
    for _ in range(3):
        request = made.next_request()
        result = made.engine.run_visits(*request)
        module = made.model.build(0)
        for j, (i, k) in enumerate(zip(*request.plan[:2], strict=True)):
            nn.utils.vector_to_parameters(made.state.modes["theta"][k], module.parameters())
            x, y = made.data.client(int(i))
            loss = nn.functional.cross_entropy(module(x), y)
            slopes = torch.autograd.grad(loss, list(module.parameters()))
            norm = torch.sqrt(sum((slope**2).sum() for slope in slopes))
            assert abs(float(result.reports.loss[j] - loss.detach())) < 1e-10
            assert abs(float(result.reports.gradient_norm[j] - norm)) < 1e-10
        alone = [k for k in range(3) if int((request.plan.mode == k).sum()) == 1]
        for k in alone:  # the mode moves to the upload of its only client
            j = int(torch.nonzero(request.plan.mode == k))
            moved = (result.uploads["theta"][k] - made.state.modes["theta"][k]).norm()
            assert abs(float(result.reports.update_norm[j] - moved)) < 1e-10
        made.run_round(result)


def test_nothing_is_measured_unless_the_schedule_asks():
    made = small_federation(fe.FedAvg(), "vector", 3, 2)
    assert made.engine.run_visits(*made.next_request()).reports is None


@KINDS
@pytest.mark.parametrize("algorithm", [fe.FedAvg(), fe.Scaffold(), fe.QSGD()], ids=str)
def test_engines_agree(kind, algorithm):
    loop, vector = (train(federation(kind, e, algorithm), 7) for e in ("loop", "vector"))
    torch.testing.assert_close(
        vector.state.modes["theta"], loop.state.modes["theta"], rtol=0, atol=1e-10
    )
    assert set(vector.state.schedule) == set(loop.state.schedule)


@KINDS
def test_a_loaded_run_goes_on_bit_for_bit(kind, tmp_path):
    whole, first = train(federation(kind), 8), train(federation(kind), 4)  # within an age
    first.save(tmp_path)
    loaded = fe.Federation.load(tmp_path, model=first.model.factory, data=classification())
    assert loaded.schedule == first.schedule
    require_equal(train(loaded, 4).tensors(), whole.tensors(), "a loaded run")


def test_with_personal_parts_the_received_model_is_the_whole_one():
    loop, vector = (
        train(federation(WorstMode, e, personal=["2.*"]), 4) for e in ("loop", "vector")
    )
    torch.testing.assert_close(vector.state.modes["theta"], loop.state.modes["theta"])


def test_each_client_trains_the_mode_at_which_it_is_worst():
    made, last = federation(WorstMode), {}
    for _ in range(12):
        plan = made.next_request().plan
        for i, k in zip(plan.client.tolist(), plan.mode.tolist(), strict=True):
            known = {m: last.get((i, m), np.inf) for m in range(3)}
            assert known[k] == max(known.values())
        result = made.engine.run_visits(*made.next_request())
        for j, (i, k) in enumerate(zip(plan.client.tolist(), plan.mode.tolist(), strict=True)):
            last[i, k] = np.float32(result.reports.loss[j])
        made.run_round(result)
    assert len(last) == 3 * len(SIZES)  # unknown modes come first


def test_each_client_trains_the_mode_that_suits_it_best():
    made, last = federation(BestMode), {}
    for _ in range(14):
        plan = made.next_request().plan
        visits = list(zip(plan.client.tolist(), plan.mode.tolist(), strict=True))
        for i, k in visits:
            known = {m: last.get((i, m), -np.inf) for m in range(3)}
            assert known[k] == min(known.values())
        result = made.engine.run_visits(*made.next_request())
        losses = result.reports.loss.numpy()
        for j, (i, k) in enumerate(visits):
            mean = np.mean([losses[n] for n, (_, m) in enumerate(visits) if m == k])
            last[i, k] = np.float32((losses[j] - mean) / mean)
        made.run_round(result)
    assert len(last) == 3 * len(SIZES)  # unknown modes come first


def test_the_order_of_losses_is_kept_whatever_their_sign():
    mode, loss = torch.tensor([0, 0, 0, 1]), torch.tensor([-3.0, -1.0, -2.0, 0.0])
    np.testing.assert_allclose(relative_losses(mode, loss, 3), [-0.5, 0.5, 0, 0])
    bad = torch.tensor([torch.inf, torch.nan, 1.0, 0.0])
    relative = relative_losses(mode, bad, 3)
    assert relative.isfinite().all()
    assert relative[0] == relative[1] > relative[2]  # nan and infinity are the worst losses


def groups_of_clients(seed, clients=8):
    """Three groups, each with a labelling rule of its own."""
    rng = np.random.default_rng(seed)
    rules = rng.normal(size=(3, 3, 16))
    data = []
    for rule in rules.repeat(clients, axis=0):
        x = rng.normal(size=(60, 16))
        data.append((torch.tensor(x), torch.tensor((x @ rule.T).argmax(1))))
    return fe.FederatedData.from_clients(data).with_calibration(0.3)


def recovered(seed, schedule):
    """The share of clients that select the mode of their group after training."""
    made = fe.Federation(
        lambda: nn.Linear(16, 3), groups_of_clients(seed), fe.FedAvg(lr=0.2), batch_size=10,
        seed=seed, schedule=schedule(modes=3, strata=1, clients_per_round=12),
    )  # fmt: skip
    train(made, 40)
    groups = [str(i // 8) for i in range(24)]
    return recovered_share(fe.personalize(made, "select").choice, groups)


def test_modes_specialise_on_groups_of_clients():
    best = [recovered(seed, BestMode) for seed in range(5)]
    balanced = [recovered(seed, Balanced) for seed in range(5)]
    assert min(best) >= 0.95 and np.mean(balanced) < 0.85, (best, balanced)


def random_reports(plan, round, seed):
    generator = np.random.default_rng([seed, round])
    loss, gradient = torch.from_numpy(generator.uniform(0.1, 3, (2, len(plan.client))))
    return VisitReports(loss, gradient, gradient, round)


def simulate(schedule, population, ages, seed=0):
    """The plans of some ages, with random reports between them."""
    state = schedule.init(population, seed)
    for round in range(ages * schedule.modes):
        plan = schedule.plan(state, round)
        yield round, plan, state
        reports = random_reports(plan, round, seed)
        state = schedule.observe(state, plan, reports.loss.float(), reports)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from([WorstModeOncePerAge, ByGradientOncePerAge]),
    modes=st.integers(1, 5),
    strata=st.integers(1, 5),
    per_stratum=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_every_stratum_trains_every_mode_exactly_once_in_an_age(
    kind, modes, strata, per_stratum, seed
):
    schedule = kind(modes=modes, strata=strata, clients_per_round=strata * per_stratum)
    seen = {}
    for round, plan, state in simulate(schedule, 4 * strata, 3, seed):
        mode = schedule.permutations(state, round // modes)[:, round % modes]
        for q in range(strata):
            seen.setdefault((round // modes, q), []).append(int(mode[q]))
        assert torch.equal(plan.mode, mode[state["stratum"][plan.client]])
        assert len(plan.client) == strata * per_stratum == len(set(plan.client.tolist()))
    assert all(sorted(each) == list(range(modes)) for each in seen.values())


def test_a_stratum_begins_an_age_with_its_worst_mode():
    schedule = WorstModeOncePerAge(modes=3, strata=2, clients_per_round=6)
    state = schedule.init(6, 0)
    plan = Plan(torch.arange(6), torch.zeros(6, dtype=torch.int64))
    for round, losses in enumerate([0.5, 0.9, 0.7]):
        plan = plan._replace(mode=torch.full((6,), round))
        loss = torch.full((6,), losses, dtype=torch.float64)
        state = schedule.observe(state, plan, loss, VisitReports(loss, loss, loss, round))
    assert schedule.permutations(state, 1).tolist() == [[1, 2, 0]] * 2


@KINDS
def test_all_clients_are_selected_equally_often(kind):
    """Also while the reports change the plans; 12 clients in 3 equal strata, 6 per round."""
    schedule = kind(modes=3, strata=3, clients_per_round=6)
    ages, counts = 400, torch.zeros(12)
    for _, plan, _ in simulate(schedule, 12, ages):
        counts += torch.bincount(plan.client, minlength=12)
    rate = counts / (3 * ages)
    assert float((rate - 0.5).abs().max()) < 5 * np.sqrt(0.25 / (3 * ages))


@pytest.mark.parametrize("kind", [ByGradient, ByGradientOncePerAge])
def test_visits_are_in_proportion_to_gradients(kind):
    schedule = kind(modes=3, strata=3, clients_per_round=12)
    state, norms = schedule.init(30, 0), torch.tensor([1.0, 2.0, 3.0]).double()
    counts = torch.zeros(3)
    for round in range(303):
        plan = schedule.plan(state, round)
        assert len(plan.client) == 12
        if round >= 3:
            counts += torch.bincount(plan.mode, minlength=3)
        report = norms[plan.mode]
        reports = VisitReports(report, report, report, round)
        state = schedule.observe(state, plan, report.float(), reports)
    np.testing.assert_allclose(counts / 3600, [1 / 6, 1 / 3, 1 / 2], atol=0.01)


def test_no_mode_starves():
    schedule = ByGradient(modes=2, clients_per_round=12, least=0.5)
    state = schedule.init(30, 0)
    plan = schedule.plan(state, 1)
    norm = torch.tensor([1e-9, 1.0]).double()[plan.mode]
    state = schedule.observe(state, plan, norm.float(), VisitReports(norm, norm, norm, 1))
    assert state["share"].tolist() == pytest.approx([0.2, 0.8])  # 0.5 and 2, of 2.5
    with pytest.raises(fe.InputError, match="0 < least <= 1; got 0"):
        ByGradient(least=0.0).init(30, 0)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), seed=st.floats(0.001, 0.999))
def test_slots(data, seed):
    groups = data.draw(st.integers(1, 6))
    most = torch.tensor(data.draw(st.lists(st.integers(1, 9), min_size=groups, max_size=groups)))
    weight = torch.tensor(
        data.draw(st.lists(st.floats(0.01, 10), min_size=groups, max_size=groups))
    )
    total = data.draw(st.integers(1, int(most.sum())))
    slots = divide_slots(weight, most, total, seed)
    assert int(slots.sum()) == total and bool(((slots >= 0) & (slots <= most)).all())


def test_joint_visits_have_no_use_for_an_assignment():
    with pytest.raises(fe.InputError, match=r"'worst-mode' assigns modes .* algorithm 'ifca'"):
        federation(WorstMode, algorithm=fe.algorithms.IFCA())
