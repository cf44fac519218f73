"""Schedules over random N, Q, K, M and ages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedensemble import Balanced, Independent, IndependentKFold, Stratified
from fedensemble.schedules.strata import divide

SEEDS = st.integers(0, 2**40)


def quantile(df):
    """Above the 1 - 1e-6 quantile of chi-square (Wilson and Hilferty, with room); seeds are fixed:
    a pass stays one.
    """
    return df + 7 * (2 * df) ** 0.5 + 16


@st.composite
def federations(draw, equal_strata=False):
    """(population, strata, modes, clients_per_round) that the schedules accept."""
    modes = draw(st.integers(1, 8))
    population = draw(st.integers(1, 40))
    per_round = draw(st.integers(1, population))
    strata = draw(st.integers(1, per_round))
    if equal_strata:
        population += -population % strata
    return population, strata, modes, per_round


def chi_square(counts):
    expected = counts.sum(-1, keepdim=True) / counts.shape[-1]
    return ((counts - expected) ** 2 / expected).sum(-1)


@settings(max_examples=60, deadline=None)
@given(federations(equal_strata=True), SEEDS, st.integers(0, 1000))
def test_rows_are_permutations_and_a_mode_meets_every_stratum_once_an_age(setting, seed, age):
    """Where strata are equal; where they are not, asking all clients equally often leaves some
    strata out at times.
    """
    population, strata, modes, per_round = setting
    schedule = Stratified(modes=modes, strata=strata, clients_per_round=per_round)
    state = schedule.init(population, seed)
    matrix = schedule.permutations(state, age)
    assert matrix.shape == (strata, modes)
    assert torch.equal(matrix.sort(1).values, torch.arange(modes).expand(strata, modes))
    met = torch.zeros(strata, modes)
    for round in range(age * modes, (age + 1) * modes):
        plan = schedule.plan(state, round)
        pairs = torch.unique(torch.stack([state["stratum"][plan.client], plan.mode]), dim=1)
        # all clients of a stratum have one mode, and every stratum has clients
        assert pairs.shape[1] == strata
        met[pairs[0], pairs[1]] += 1
    assert bool((met == 1).all())


@settings(max_examples=100, deadline=None)
@given(federations(), SEEDS, st.integers(0, 10_000))
def test_exactly_m_visits_and_one_mode_a_client(setting, seed, round):
    population, strata, modes, per_round = setting
    for kind in (Stratified, Independent):
        schedule = kind(modes=modes, strata=strata, clients_per_round=per_round)
        plan = schedule.plan(schedule.init(population, seed), round)
        assert len(plan.client) == len(plan.mode) == per_round
        assert len(set(plan.client.tolist())) == per_round
        assert plan.client.tolist() == sorted(plan.client.tolist())
        assert int(plan.client.min()) >= 0
        assert int(plan.client.max()) < population
        assert int(plan.mode.min()) >= 0
        assert int(plan.mode.max()) < modes


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.data(), SEEDS)
def test_strata_differ_by_one_client_at_most(population, data, seed):
    strata = data.draw(st.integers(1, population))
    sizes = torch.bincount(divide(population, strata, seed), minlength=strata)
    assert int(sizes.sum()) == population
    assert int(sizes.max() - sizes.min()) <= 1


@settings(max_examples=60, deadline=None)
@given(federations(), SEEDS, st.integers(0, 1000))
def test_a_mode_has_clients_for_each_of_its_strata(setting, seed, age):
    """M / Q, rounded, also where a stratum gives none: so a mode waits only if no stratum has drawn
    it.
    """
    population, strata, modes, per_round = setting
    schedule = Stratified(modes=modes, strata=strata, clients_per_round=per_round)
    state = schedule.init(population, seed)
    matrix = schedule.permutations(state, age)
    for place in range(modes):
        visits = torch.bincount(schedule.plan(state, age * modes + place).mode, minlength=modes)
        served = torch.bincount(matrix[:, place], minlength=modes)
        assert bool((visits >= served * per_round // strata).all())
        assert bool((visits <= -(-served * per_round // strata)).all())


@settings(max_examples=60, deadline=None)
@given(federations(), SEEDS, st.integers(0, 1000))
def test_balanced_spreads_modes_evenly_and_has_no_idle_mode_if_there_are_enough_strata(
    setting, seed, age
):
    population, strata, modes, per_round = setting
    schedule = Balanced(modes=modes, strata=strata, clients_per_round=per_round)
    state = schedule.init(population, seed)
    matrix = schedule.permutations(state, age)
    assert torch.equal(matrix.sort(1).values, torch.arange(modes).expand(strata, modes))
    counts = torch.stack([torch.bincount(column, minlength=modes) for column in matrix.T])
    assert int(counts.min()) == strata // modes
    assert int(counts.max()) == -(-strata // modes)
    for round in range(age * modes, (age + 1) * modes):
        trained = set(schedule.plan(state, round).mode.tolist())
        assert len(trained) == min(modes, strata)


@settings(max_examples=60, deadline=None)
@given(federations(), SEEDS, st.integers(0, 1000))
def test_independent_trains_one_mode_a_round_and_kfold_all(setting, seed, round):
    population, strata, modes, per_round = setting
    options = {"modes": modes, "strata": strata, "clients_per_round": per_round}
    equal = Independent(**options)
    plan = equal.plan(equal.init(population, seed), round)
    assert set(plan.mode.tolist()) == {round % modes}
    kfold = IndependentKFold(**options)
    plan = kfold.plan(kfold.init(population, seed), round)
    assert torch.bincount(plan.mode, minlength=modes).tolist() == [per_round] * modes
    assert len(set(zip(plan.client.tolist(), plan.mode.tolist(), strict=True))) == per_round * modes
    assert plan.client.tolist() == sorted(plan.client.tolist())


@pytest.mark.parametrize("kind", [Stratified, Balanced])
def test_marginals_are_uniform_over_many_ages(kind):
    modes, strata, ages = 4, 6, 1500
    schedule = kind(modes=modes, strata=strata, clients_per_round=6)
    state = schedule.init(12, seed=3)
    matrices = torch.stack([schedule.permutations(state, age) for age in range(ages)])  # [T, Q, K]
    counts = torch.nn.functional.one_hot(matrices, modes).sum(0).double()  # [Q, K places, K modes]
    assert float(chi_square(counts).max()) < quantile(modes - 1)


def test_orders_of_a_stratum_are_uniform_and_independent_of_its_neighbour():
    schedule = Stratified(modes=3, strata=2, clients_per_round=2)
    state = schedule.init(4, seed=1)
    matrices = torch.stack([schedule.permutations(state, age) for age in range(3600)])
    code = matrices[..., 0] * 3 + matrices[..., 1]  # which of six orders, [T, Q]
    seen = torch.unique(code)
    assert len(seen) == 6
    index = torch.searchsorted(seen, code)
    joint = torch.bincount(index[:, 0] * 6 + index[:, 1], minlength=36).double()
    assert float(chi_square(joint)) < quantile(35)


def test_clients_of_equal_strata_are_drawn_alike():
    schedule = Stratified(modes=2, strata=5, clients_per_round=7)
    state = schedule.init(20, seed=0)
    drawn = torch.cat([schedule.plan(state, round).client for round in range(3000)])
    # Without replacement the counts scatter less than a multinomial's, so the bound holds all the
    # more.
    assert float(chi_square(torch.bincount(drawn, minlength=20).double())) < quantile(19)
