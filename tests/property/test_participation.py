"""Whose answers count: places for every mode, the first to finish, nobody who is away; all of it
from the seed.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedensemble import FedAvg
from fedensemble.core.participation import Costs
from fedensemble.core.sampling import sample_without_replacement
from fedensemble.core.types import Plan
from fedensemble.core.visits.batches import LocalWork
from fedensemble.participation import Devices
from fedensemble.participation.availability import (
    DAY,
    replace_unavailable_clients,
    seconds_left,
    windows,
)
from fedensemble.participation.quotas import first_to_finish, quotas
from fedensemble.schedules import Balanced, Independent, IndependentKFold, Stratified

SEEDS = st.integers(0, 10_000)
counts = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any).map(torch.tensor)


@st.composite
def rounds(draw):
    """A schedule, a participation, a clock and a round."""
    modes, strata = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    per_round = draw(st.integers(strata, 20))
    ask = draw(st.none() | st.integers(per_round, 30))
    kind = draw(st.sampled_from([Stratified, Balanced, Independent, IndependentKFold]))
    schedule = kind(modes=modes, strata=strata, clients_per_round=per_round)
    least = draw(st.sampled_from([0.5, 6.0, 12.0, 24.0]))
    participation = Devices(
        ask=ask,
        drop=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0])),
        least_hours=least,
        most_hours=draw(st.sampled_from([least, 24.0])),
        deadline=draw(st.sampled_from([None, 30.0, 300.0])),
    )
    return (
        schedule,
        participation,
        draw(st.integers(30, 90)),
        draw(SEEDS),
        draw(st.floats(0, 1e6)),
        draw(SEEDS),
    )


def answer(schedule, participation, population, seed, clock, round):
    """The outcome of a round, and the plan of those who would have been asked."""
    sizes = 1 + torch.arange(population) % 37
    costs = Costs(FedAvg(), torch.zeros(2000), 0, sizes, LocalWork(epochs=2, batch_size=4), seed)
    selecting = participation.selection_schedule(schedule)
    planned = selecting.init(population, seed)
    state = {
        **participation.init(population, seed),
        "clock": torch.tensor(clock, dtype=torch.float64),
    }
    return (
        participation.outcome(state, schedule, planned, round, costs),
        selecting.plan(planned, round),
        state,
    )


@settings(deadline=None)
@given(rounds())
def test_an_outcome_adds_up(case):
    schedule, participation, *_ = case
    (plan, state, turnout), wanted, before = answer(*case)
    many = 1 if schedule.one_mode_per_client else schedule.modes
    assert len(plan.client) <= schedule.clients_per_round * many
    assert len(plan.client) + turnout.late + turnout.dropped == turnout.asked
    assert turnout.asked + turnout.away == len(wanted.client)
    assert plan.client.tolist() == sorted(plan.client.tolist())
    assert (
        turnout.seconds > 0
        and turnout.clock == float(state["clock"]) == float(before["clock"]) + turnout.seconds
    )
    if participation.deadline is not None:
        assert turnout.seconds <= participation.deadline
    if schedule.one_mode_per_client:
        assert len(set(plan.client.tolist())) == len(plan.client)
    assert len(set(zip(plan.client.tolist(), plan.mode.tolist(), strict=True))) == len(plan.client)


@settings(deadline=None)
@given(rounds())
def test_an_outcome_is_a_function_of_state_and_round(case):
    (plan, state, turnout), _, before = answer(*case)
    (again, state_again, turnout_again), _, _ = answer(*case)
    assert all(map(torch.equal, plan[:2], again[:2])) and turnout == turnout_again
    assert float(before["clock"]) == case[4]  # nothing was written into
    assert state["clock"].equal(state_again["clock"])


@settings(deadline=None)
@given(rounds())
def test_nobody_outside_the_window_is_kept(case):
    _, participation, population, seed, clock, _ = case
    (plan, _, turnout), _, _ = answer(*case)
    if participation.least_hours == participation.most_hours == 24:
        assert turnout.away == 0
        return
    opens, length = windows(population, participation.least_hours, participation.most_hours, seed)
    for client in plan.client.tolist():
        since = (clock - float(opens[client])) % DAY
        assert since < float(length[client])


@settings(deadline=None)
@given(rounds())
def test_no_mode_starves_while_all_answer(case):
    schedule, participation, *others = case
    calm = dataclasses.replace(
        participation, drop=0.0, deadline=None, least_hours=24.0, most_hours=24.0
    )
    (plan, _, turnout), wanted, _ = answer(schedule, calm, *others)
    asked = torch.bincount(wanted.mode, minlength=schedule.modes)
    kept = torch.bincount(plan.mode, minlength=schedule.modes)
    places = schedule.clients_per_round * (1 if schedule.one_mode_per_client else schedule.modes)
    assert int(kept.sum()) == min(places, len(wanted.client))
    assert turnout.dropped == turnout.away == 0
    if places >= int((asked > 0).sum()):
        assert bool(((kept > 0) == (asked > 0)).all())


@settings(deadline=None)
@given(counts, st.integers(1, 200), SEEDS, SEEDS)
def test_quotas(asked, keep, seed, round):
    places = quotas(asked, keep, seed, round)
    assert int(places.sum()) == min(keep, int(asked.sum()))
    assert bool((places <= asked).all()) and bool((places >= 0).all())
    if keep >= int((asked > 0).sum()):
        assert bool((places[asked > 0] >= 1).all())
    exact = asked.double() * min(keep, int(asked.sum())) / int(asked.sum())
    # a mode's share, but for its sure place and rounding
    assert float((places - exact).abs().max()) < 2


@settings(deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 40))
def test_the_first_to_finish_have_the_places(data, modes, visits):
    numbers = st.lists(st.integers(0, 30), min_size=visits, max_size=visits).map(torch.tensor)
    mode = data.draw(numbers).long() % modes
    finish = data.draw(numbers).double()
    answers = data.draw(
        st.lists(st.booleans(), min_size=visits, max_size=visits).map(torch.tensor)
    ).bool()
    places = data.draw(
        st.lists(st.integers(0, 9), min_size=modes, max_size=modes).map(torch.tensor)
    )
    kept = first_to_finish(mode, finish, answers, places)
    assert not bool((kept & ~answers).any())
    assert int(kept.sum()) == min(int(places.sum()), int(answers.sum()))
    for k in range(modes):
        inside, waiting = finish[kept & (mode == k)], finish[answers & ~kept & (mode == k)]
        assert len(inside) >= min(int(places[k]), int((answers & (mode == k)).sum()))
        if len(inside) and len(waiting):
            assert float(inside.max()) <= float(waiting.min())


@settings(deadline=None)
@given(st.data(), st.integers(1, 60), st.integers(1, 6), SEEDS)
def test_stand_ins_are_of_the_same_stratum_and_there(data, population, strata, seed):
    stratum = torch.arange(population) % strata
    there = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=population, max_size=population))
    )
    chosen = data.draw(
        st.lists(st.integers(0, population - 1), unique=True, max_size=population).map(sorted)
    )
    client = torch.tensor(chosen, dtype=torch.int64)
    plan = Plan(client, stratum[client] % 3)  # a stratum trains one mode
    made = replace_unavailable_clients(plan, stratum, there, seed, 0, one_mode_per_client=True)
    assert bool(there[made.client].all())
    assert len(set(made.client.tolist())) == len(made.client)
    assert made.client.tolist() == sorted(made.client.tolist())
    assert torch.equal(made.mode, stratum[made.client] % 3)
    # who was there is still asked
    assert set(client[there[client]].tolist()) <= set(made.client.tolist())
    for q in range(strata):
        wanted, possible = int((stratum[client] == q).sum()), int((there & (stratum == q)).sum())
        assert int((stratum[made.client] == q).sum()) == min(wanted, possible)


@settings(deadline=None)
@given(st.data(), st.integers(1, 200), st.integers(1, 6))
def test_lowest_is_what_sorting_all_of_them_gives(data, population, groups):
    drawn = torch.tensor(
        data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=population, max_size=population))
    )
    group = torch.tensor(
        data.draw(st.lists(st.integers(0, groups - 1), min_size=population, max_size=population))
    )
    share = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=groups, max_size=groups)))
    expected = []
    for q in range(groups):
        inside = [i for i in range(population) if int(group[i]) == q]
        expected += sorted(inside, key=lambda i: (int(drawn[i]), i))[: int(share[q])]
    assert sample_without_replacement(group, drawn, share).tolist() == expected


def test_lowest_thins_out_and_still_finds_all():
    group = torch.arange(50_000) % 7
    drawn = (torch.arange(50_000) * 2654435761 % 2**31) << 32
    share = torch.tensor([3, 0, 1, 9, 2, 2, 5])
    order = torch.argsort(drawn, stable=True)
    expected = torch.cat([order[group[order] == q][: share[q]] for q in range(7)])
    assert torch.equal(sample_without_replacement(group, drawn, share), expected)
    # a group whose numbers are all high comes out short
    lucky = torch.where(group == 2, drawn // 2 + 2**62, drawn)
    order = torch.argsort(lucky, stable=True)
    assert torch.equal(
        sample_without_replacement(group, lucky, share),
        torch.cat([order[group[order] == q][: share[q]] for q in range(7)]),
    )


@settings(deadline=None)
@given(st.floats(0, 1e7), st.floats(1, DAY), st.floats(0, DAY - 1))
def test_a_window_opens_and_closes_every_day(clock, length, opens):
    left = float(
        seconds_left(
            *(torch.tensor([value], dtype=torch.float64) for value in (opens, length)), clock
        )[0]
    )
    since = (clock - opens) % DAY
    if length >= DAY:
        assert left == float("inf")
    else:
        assert left == pytest.approx(max(length - since, 0), abs=1e-6)


def test_drop_outs_come_about_as_often_as_asked():
    schedule = Stratified(modes=2, strata=2, clients_per_round=60)
    for drop in (0.1, 0.5):
        dropped = sum(
            answer(schedule, Devices(drop=drop), 90, 3, 0.0, round)[0].turnout.dropped
            for round in range(50)
        )
        spread = (3000 * drop * (1 - drop)) ** 0.5
        assert abs(dropped - 3000 * drop) < 4 * spread


def test_windows_are_as_long_as_asked_and_begin_all_day():
    opens, length = windows(20_000, 6.0, 10.0, 1)
    assert float(length.min()) >= 6 * 3600 and float(length.max()) <= 10 * 3600
    there = [
        float((seconds_left(opens, length, hour * 3600.0) > 0).double().mean())
        for hour in range(0, 48, 5)
    ]
    # six standard deviations of 20,000 coins
    assert all(abs(share - 8 / 24) < 0.02 for share in there)
