"""For all N, Q, M clients are asked equally often, train every mode equally often and count alike
in the means.
"""

from hashlib import sha256

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedensemble import Balanced, Devices, FedAvg, FederatedData, Federation, Stratified
from fedensemble.core.participation import Costs
from fedensemble.core.schedule import schedules
from fedensemble.core.visits.batches import LocalWork
from fedensemble.schedules.strata import apportion, draw_plan, fill_slots

# N, Q, M, K: strata that divide neither N nor M, one client per stratum, more modes than clients,
# everybody.
GRID = [
    (15, 10, 10, 2),
    (12, 10, 10, 5),
    (50, 20, 20, 4),
    (105, 10, 10, 5),
    (13, 5, 7, 4),
    (11, 3, 4, 6),
    (20, 5, 7, 2),
]
ROUNDS = 400
ERRORS = 5  # standard errors; seeds are fixed, so that a pass stays one


def rates(schedule, population, rounds, seed=4):
    """Whether a client trained a mode in a round, [R, N, K], and its weight in the mode's mean, [R,
    N].
    """
    state = schedule.init(population, seed)
    met = torch.zeros(rounds, population, schedule.modes, dtype=torch.float64)
    for round in range(rounds):
        plan = schedule.plan(state, round)
        met[round, plan.client, plan.mode] = 1
    return met, (met / met.sum(1, keepdim=True).clamp(min=1)).sum(2), schedule.stratum(state)


def errors(values, expected, least):
    """How many standard errors the means of columns [R, ...] are from what is expected.

    Args:
        least: standard deviation of one row that is assumed at least; columns that never vary are
            off by many errors.
    """
    deviation = torch.clamp(values.std(0), min=least)
    return float(((values.mean(0) - expected).abs() / deviation).max() * len(values) ** 0.5)


@pytest.mark.parametrize(("population", "strata", "per_round", "modes"), GRID)
@pytest.mark.parametrize("name", list(schedules))
def test_clients_are_asked_equally_often(name, population, strata, per_round, modes):
    schedule = schedules[name](modes=modes, strata=strata, clients_per_round=per_round)
    met, _, stratum = rates(schedule, population, ROUNDS)
    visits = per_round * (1 if schedule.one_mode_per_client else modes)
    asked = met.sum(2)
    assert errors(asked, visits / population, least=0.1) < ERRORS
    # each pair of client and mode
    assert errors(met.flatten(1), visits / population / modes, least=0.1) < ERRORS
    # All clients of a large stratum together: where strata have ten clients and eleven, no single
    # one tells.
    large = torch.arange(population) % 2 == 0
    if stratum is not None:
        sizes = torch.bincount(stratum)[stratum]
        large = sizes == sizes.max()
    assert (
        errors(asked[:, large].sum(1, keepdim=True), visits * large.double().mean(), least=0.1)
        < ERRORS
    )


@pytest.mark.parametrize(("population", "strata", "modes"), [(15, 10, 2), (15, 10, 10), (23, 5, 5)])
@pytest.mark.parametrize("kind", [Stratified, Balanced])
def test_clients_count_alike_in_the_means(kind, population, strata, modes):
    """The server averages over a mode's clients. If modes had as many clients as their strata give,
    those of large strata would count for up to 25 % less, though they are asked as often."""
    per_round = 10
    schedule = kind(modes=modes, strata=strata, clients_per_round=per_round)
    _, weights, stratum = rates(schedule, population, 2 * ROUNDS)
    sizes = torch.bincount(stratum)[stratum]
    few, many = (weights[:, sizes == size].mean(1) for size in (sizes.min(), sizes.max()))
    ratio = float(many.mean() / few.mean())
    scatter = float((many - ratio * few).std() / few.mean()) / len(weights) ** 0.5
    assert abs(ratio - 1) < 0.02 + 3 * scatter
    assert scatter < 0.03  # or the line above says nothing


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), st.data())
def test_expected_shares_are_exactly_in_proportion(sizes, data):
    sizes = torch.tensor(sizes)
    population = int(sizes.sum())
    total = data.draw(st.integers(0, population))
    drawn = torch.stack([apportion(sizes, total, start) for start in range(population)])
    assert bool((drawn.sum(1) == total).all())
    assert bool((drawn <= sizes).all())
    # over all starts, each as likely: N times the expectation
    assert torch.equal(drawn.sum(0), total * sizes)
    assert bool((drawn >= total * sizes // population).all())
    assert bool((drawn <= -(-total * sizes // population)).all())


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**40), st.integers(0, 1000), st.data()
)
def test_plans_of_any_numbers(population, modes, seed, round, data):
    """Also with fewer clients than strata, which the schedules refuse."""
    strata, total = data.draw(st.integers(1, population)), data.draw(st.integers(1, population))
    stratum = torch.arange(population) % strata
    mode = torch.tensor(
        data.draw(st.lists(st.integers(0, modes - 1), min_size=strata, max_size=strata))
    )
    plan = draw_plan(stratum, mode, modes, total, seed, round)
    assert len(set(plan.client.tolist())) == len(plan.client) == total
    assert plan.client.tolist() == sorted(plan.client.tolist())
    share = torch.bincount(stratum[plan.client], minlength=strata)
    expected = total * torch.bincount(stratum, minlength=strata)
    assert bool((share >= expected // population).all())
    assert bool((share <= -(-expected // population)).all())
    visits = torch.bincount(plan.mode, minlength=modes)
    expected = total * torch.bincount(mode, minlength=modes)
    assert bool((visits >= expected // strata).all())
    assert bool((visits <= -(-expected // strata)).all())
    if population % strata == 0:
        assert torch.equal(plan.mode, mode[stratum[plan.client]])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 2**40), st.randoms())
def test_as_few_visits_as_possible_change_their_mode(modes, key, random):
    mode = torch.tensor(modes)
    places = torch.bincount(torch.tensor([random.randrange(6) for _ in modes]), minlength=6)
    filled = fill_slots(mode, places, key)
    assert torch.equal(torch.bincount(filled, minlength=6), places)
    surplus = (torch.bincount(mode, minlength=6) - places).clamp(min=0)
    assert int((filled != mode).sum()) == int(surplus.sum())


PLANS = {
    (Stratified, 100, 5, 10, 10): "43ecdc5b82059246",
    (Stratified, 12, 3, 4, 8): "466196ba951d7c49",
    (Stratified, 60, 3, 6, 12): "2804bfe8d4fcaf0f",
    (Stratified, 15, 1, 1, 10): "37fe369aa6d721ce",
    (Balanced, 100, 5, 10, 10): "d5ffc239df9ec72d",
    (Balanced, 12, 3, 4, 8): "2da80211812e2fa6",
    (Balanced, 60, 3, 6, 12): "cbe83409e41bdfc3",
}


@pytest.mark.parametrize("setting", PLANS, ids=str)
def test_plans_where_strata_divide_clients_and_visits_stay_as_they_were(setting):
    """Recorded results depend on them: these are the plans of version 1.0."""
    kind, population, modes, strata, per_round = setting
    schedule = kind(modes=modes, strata=strata, clients_per_round=per_round)
    state = schedule.init(population, seed=7)
    plans = b"".join(
        torch.stack(schedule.plan(state, round)[:2]).numpy().tobytes() for round in range(4 * modes)
    )
    assert sha256(plans).hexdigest()[:16] == PLANS[setting]


@pytest.mark.parametrize("name", list(schedules))
def test_devices_of_one_kind_answer_equally_often(name):
    """Of 13 who are asked 10 count; all finish at the same time, and low numbers must not always be
    first.
    """
    population, rounds = 15, 400
    schedule = schedules[name](modes=2, strata=7, clients_per_round=10)
    devices = Devices(ask=13, compute_spread=0, bandwidth_spread=0)
    planned = devices.selection_schedule(schedule).init(population, seed=5)
    state = devices.init(population, seed=5)
    costs = Costs(
        FedAvg(), torch.zeros(3), 0, torch.full((population,), 4), LocalWork(batch_size=4), seed=5
    )
    counted = torch.zeros(rounds, population, dtype=torch.float64)
    for round in range(rounds):
        plan = devices.outcome(state, schedule, planned, round, costs).plan
        counted[round].index_add_(0, plan.client, torch.ones(len(plan.client), dtype=torch.float64))
    visits = 10 * (1 if schedule.one_mode_per_client else 2)
    assert errors(counted, visits / population, least=0.1) < ERRORS


@pytest.mark.parametrize("schedule", ["stratified", "balanced"])
def test_fixed_point_of_fedavg_is_the_uniform_optimum(schedule):
    """Client i pulls towards b_i; clients that count more would pull the mean of the iterates
    towards theirs.
    """
    strata = 10
    target = torch.linspace(-3, 3, 15, dtype=torch.float64).square()
    # Strata are random, but known: the clients of small ones get the largest targets.
    state = Stratified(modes=2, strata=strata, clients_per_round=10).init(15, seed=0)
    size = torch.bincount(state["stratum"])[state["stratum"]]
    target = target.sort(descending=True).values[torch.argsort(torch.argsort(size))]
    data = FederatedData.from_clients([(torch.ones(1, 1), value.reshape(1, 1)) for value in target])
    federation = Federation(
        lambda: nn.Linear(1, 1, bias=False),
        data,
        FedAvg(lr=0.02, weighting="uniform"),
        modes=2,
        strata=strata,
        clients_per_round=10,
        schedule=schedule,
        loss="mse",
        steps=1,
        dtype=torch.float64,
        seed=0,
    )
    seen = [federation.state.modes["theta"].mean() for _ in federation.rounds(500)][100:]
    assert abs(float(torch.stack(seen).mean() - target.mean())) < 0.1
