"""SCAFFOLD, FedDyn, FedPD and FedSplit reach the optimum of clients that disagree, where FedAvg
stops beside it.
"""

import numpy as np
import pytest
import torch

from fedensemble import SGD, FedAvg, FedDyn, FedPD, FedProx, FedSplit, InputError, Scaffold
from fedensemble.core.visits.visit_keys import shared_uniform
from fedensemble.testing.toy_problems import numbers, quadratic_problem

LR, ROUNDS = 0.1, 80
# 1e-6 is asked for. The numbers of rounds leave less than a tenth of it: the slowest method comes
# below 1e-7 for good after 62 rounds, with partial participation after 208, in an ensemble after
# 207.
EXACT = 1e-6
BIASED = 1e-2
SAME_FORMULA = 1e-12  # float64, some hundred operations on numbers of order one

METHODS = {
    "scaffold": lambda **more: Scaffold(lr=LR, **more),
    "scaffold, longer server steps": lambda **more: Scaffold(lr=0.05, server_lr=1.5, **more),
    "feddyn": lambda **more: FedDyn(lr=LR, alpha=1.0, **more),
    "fedpd": lambda **more: FedPD(lr=LR, eta=1.0, **more),
    "fedsplit": lambda **more: FedSplit(lr=LR, s=1.0, **more),
}


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("name", METHODS)
def test_reaches_the_optimum(name, weighting, regression):
    assert regression.error(METHODS[name](weighting=weighting), ROUNDS) < EXACT


@pytest.mark.parametrize(
    "algorithm", [FedAvg(lr=LR), FedProx(lr=LR, mu=0.5)], ids=["fedavg", "fedprox"]
)
def test_averaging_does_not(algorithm, regression):
    assert regression.error(algorithm, ROUNDS) > BIASED  # where it stops instead: test_closed_forms


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize(("name", "rounds"), [("scaffold", 120), ("feddyn", 220)])
def test_reaches_it_with_two_clients_of_five_and_two_modes(name, rounds, weighting, regression):
    """Their papers cover partial participation; each mode has the optimum to itself."""
    algorithm = METHODS[name](weighting=weighting)
    assert regression.error(algorithm, rounds, clients_per_round=2) < EXACT
    assert regression.error(algorithm, rounds, modes=2, strata=2, clients_per_round=4) < EXACT


EXACT_IN_AN_ENSEMBLE = {
    "scaffold": (80, lambda **more: Scaffold(lr=LR, **more)),
    "feddyn": (220, lambda **more: FedDyn(lr=LR, alpha=1.0, **more)),
    "fedpd": (220, lambda **more: FedPD(lr=LR, eta=1.0, average="all", **more)),
    "fedsplit": (110, lambda **more: FedSplit(lr=LR, s=1.0, average="all", **more)),
}


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("name", EXACT_IN_AN_ENSEMBLE)
def test_three_modes_reach_it(name, weighting, regression):
    """Everybody is asked, yet a mode has two or three of the five clients in a round, or none."""
    rounds, make = EXACT_IN_AN_ENSEMBLE[name]
    assert regression.error(make(weighting=weighting), rounds, modes=3, strata=2) < EXACT


@pytest.mark.parametrize("kind", [FedPD, FedSplit])
def test_the_mean_over_those_who_report_does_not(kind, regression):
    assert regression.error(kind(lr=LR, average="reporting"), 100, modes=3, strata=2) > BIASED


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("kind", [FedPD, FedSplit])
def test_both_averages_are_the_papers_method_with_full_participation(kind, weighting, regression):
    everybody, reporting = (
        regression.federation(kind(lr=LR, average=average, weighting=weighting))
        for average in ("all", "reporting")
    )
    for _ in zip(everybody.rounds(12), reporting.rounds(12), strict=True):
        torch.testing.assert_close(
            everybody.state.modes["theta"],
            reporting.state.modes["theta"],
            rtol=0,
            atol=SAME_FORMULA,
        )
    torch.testing.assert_close(everybody.state.modes["seen"], torch.ones(1, 1, dtype=torch.float64))


def test_fedpd_over_all_clients_has_no_silent_rounds():
    with pytest.raises(
        InputError, match=r"average 'all' communicates in every round and needs p = 0; got 0\.5"
    ):
        FedPD(average="all", p=0.5)
    for kind in (FedPD, FedSplit):
        with pytest.raises(
            InputError, match=f"{kind.__name__} needs average 'all' or 'reporting'; got 'some'"
        ):
            kind(average="some")


def test_the_two_optima_differ(regression):
    """Or the test above would not tell a wrong weight."""
    assert (
        float((regression.optimum("examples") - regression.optimum("uniform")).abs().max()) > BIASED
    )


@pytest.mark.parametrize("name", ["fedpd", "fedsplit"])
def test_stays_near_it_with_three_clients_of_five(name, regression):
    """Their papers do not: the mean of whoever reports moves about the optimum, but does not run
    away.
    """
    assert 1e-3 < regression.error(METHODS[name](), 150, clients_per_round=3) < 2.0


def test_fedsplit_with_its_prox_solved_is_peaceman_rachford(regression):
    """200 steps solve the prox to 0.9^200 = 1e-9; then the rounds are those of the operator, with
    exact solves.
    """
    federation = regression.federation(FedSplit(lr=LR, s=1.0, weighting="uniform"), steps=200)
    x = federation.state.modes["theta"][0].clone()
    z = [x.clone() for _ in regression.forms]
    eye = torch.eye(len(x), dtype=torch.float64)
    for _ in federation.rounds(5):
        halves = [
            torch.linalg.solve(eye + a, 2 * x - old + b)
            for (a, b), old in zip(regression.forms, z, strict=True)
        ]
        z = [old + 2 * (half - x) for old, half in zip(z, halves, strict=True)]
        x = torch.stack(z).mean(0)
        torch.testing.assert_close(federation.state.modes["theta"][0], x, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("updates", "stale"), [(4, False), (5, True)])
def test_fedsplit_after_missed_rounds(updates, stale):
    """A client that took part in the last update goes on from its z_i; one that did not, from x -
    (u - z_half).
    """
    algorithm = FedSplit(lr=LR, s=0.8)
    x, z, pull = (numbers(5, 6, word=word) for word in (50, 51, 52))
    counts = [torch.full((5, 1), float(count), dtype=torch.float64) for count in (updates, 3)]
    sent, memory = {"theta": x, "updates": counts[0]}, {"z": z, "pull": pull, "updates": counts[1]}
    uploads, kept = algorithm.local_training(sent, memory, quadratic_problem(algorithm, 5, 6))
    z = x - pull if stale else z
    u = 2 * x - z
    half = quadratic_problem(algorithm, 5, 6).descend(
        x, lambda theta, gradient: gradient + (theta - u) / 0.8
    )
    torch.testing.assert_close(uploads["theta"], z + 2 * (half - x), rtol=0, atol=SAME_FORMULA)
    torch.testing.assert_close(kept["pull"], u - half, rtol=0, atol=SAME_FORMULA)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_fedpd_step_by_step(p, regression):
    """The paper's Algorithm 1 with exact gradients; coins are the library's."""
    eta, steps = 0.7, 4
    federation = regression.federation(FedPD(lr=LR, eta=eta, p=p, weighting="uniform"), steps=steps)
    clients = range(len(regression.forms))
    start = federation.state.modes["theta"][0].numpy().copy()
    server, own, dual = start, [start for _ in clients], [np.zeros_like(start) for _ in clients]
    talks = []
    for round, _ in enumerate(federation.rounds(8)):
        for i in clients:
            x = own[i]
            for _ in range(steps):
                gradient = regression.gradient(i, torch.tensor(x)).numpy()
                x = x - LR * (gradient + dual[i] + (x - own[i]) / eta)
            dual[i] = dual[i] + (x - own[i]) / eta
            own[i] = x + eta * dual[i]
        talks.append(float(shared_uniform(federation.seed, round, torch.tensor(0))) >= p)
        if talks[-1]:
            server = sum(own) / len(own)
            own = [server for _ in clients]
        np.testing.assert_allclose(
            federation.state.modes["theta"][0].numpy(), server, rtol=0, atol=SAME_FORMULA
        )
    assert set(talks) == ({True} if p == 0 else {True, False})


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_fedpd_counts_only_messages_that_are_sent(p, regression):
    """Up: in rounds that communicate. Down: to clients whose own copy is older than the last such
    round.
    """
    federation = regression.federation(FedPD(lr=LR, p=p), modes=2, strata=2, clients_per_round=4)
    seen, talked, known = set(), [0, 0], {}
    for round, report in enumerate(federation.rounds(16)):
        # each visit's mode has its shared_draw
        talks = shared_uniform(federation.seed, round, report.plan.mode)[:, 0] >= p
        visits = list(zip(report.plan.client.tolist(), report.plan.mode.tolist(), strict=True))
        fresh = [known.get(visit) == talked[visit[1]] for visit in visits]
        assert report.bytes_up == int(talks.sum()) * 3 * 8
        # the model and the count of talks
        assert report.bytes_down == fresh.count(False) * (3 + 1) * 8
        known |= {visit: talked[visit[1]] for visit in visits}
        for mode in {visit[1] for visit, talk in zip(visits, talks.tolist(), strict=True) if talk}:
            talked[mode] += 1
        seen |= set(talks.tolist()) | {"silent" for value in fresh if value}
    assert seen == ({True} if p == 0 else {True, False, "silent"})


def test_feddyn_with_infinite_alpha_keeps_the_model(regression):
    alpha = 1e8
    federation = regression.federation(FedDyn(lr=0.5 / alpha, alpha=alpha, weighting="uniform"))
    start = federation.state.modes["theta"].clone()
    for _ in federation.rounds(3):
        pass
    # gradients of ten over alpha
    torch.testing.assert_close(federation.state.modes["theta"], start, rtol=0, atol=1e-6)


def test_scaffold_step_by_step(regression):
    """The paper's Algorithm 1 with option II: fixed points alone would not tell a wrong control
    variate.
    """
    steps, clients = 4, range(len(regression.forms))
    federation = regression.federation(
        Scaffold(lr=LR, server_lr=0.8, weighting="uniform"), steps=steps
    )
    w = federation.state.modes["theta"][0].clone()
    c, c_i = torch.zeros_like(w), [torch.zeros_like(w) for _ in clients]
    for _ in federation.rounds(5):
        ends, new = [], []
        for i in clients:
            v = w
            for _ in range(steps):
                v = v - LR * (regression.gradient(i, v) - c_i[i] + c)
            ends.append(v)
            new.append(c_i[i] - c + (w - v) / (steps * LR))
        w = w + 0.8 * sum(v - w for v in ends) / len(ends)
        c, c_i = c + sum(n - old for n, old in zip(new, c_i, strict=True)) / len(new), new
        torch.testing.assert_close(federation.state.modes["theta"][0], w, rtol=0, atol=SAME_FORMULA)
        torch.testing.assert_close(federation.state.modes["c"][0], c, rtol=0, atol=SAME_FORMULA)


def test_feddyn_step_by_step(regression):
    """The paper's Algorithm 1, all clients taking part."""
    steps, alpha, clients = 4, 0.7, range(len(regression.forms))
    federation = regression.federation(FedDyn(lr=LR, alpha=alpha, weighting="uniform"), steps=steps)
    w = federation.state.modes["theta"][0].clone()
    h, h_i = torch.zeros_like(w), [torch.zeros_like(w) for _ in clients]
    for _ in federation.rounds(5):
        ends = []
        for i in clients:
            v = w
            for _ in range(steps):
                v = v - LR * (regression.gradient(i, v) - h_i[i] + alpha * (v - w))
            ends.append(v)
            h_i[i] = h_i[i] - alpha * (v - w)
        h = h - alpha * sum(v - w for v in ends) / len(ends)
        w = sum(ends) / len(ends) - h / alpha
        torch.testing.assert_close(federation.state.modes["theta"][0], w, rtol=0, atol=SAME_FORMULA)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize(("kind", "name"), [(Scaffold, "c"), (FedDyn, "h")])
def test_the_server_keeps_the_weighted_mean_of_what_clients_remember(
    kind, name, weighting, regression
):
    federation = regression.trained(kind(lr=LR, weighting=weighting), 7, clients_per_round=2)
    mean = regression.mean_memory(federation, name)
    torch.testing.assert_close(federation.state.modes[name][0], mean, rtol=0, atol=SAME_FORMULA)


def test_bad_settings():
    with pytest.raises(InputError, match="SGD without momentum"):
        Scaffold(optimizer=SGD(momentum=0.5))
    for kind, settings in (
        (Scaffold, {"server_lr": 0}),
        (FedDyn, {"alpha": 0}),
        (FedPD, {"p": 1.0}),
        (FedSplit, {"s": 0}),
    ):
        with pytest.raises(InputError, match=f"{kind.__name__} needs"):
            kind(**settings)
