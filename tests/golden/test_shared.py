"""Shared parameters against one model of FedAvg, and against NumPy where only a part is shared."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from fedensemble import Balanced, FederatedData, Federation, Stratified
from fedensemble.algorithms import (
    QSGD,
    FedAc,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedYogi,
)
from fedensemble.robust import GeometricMedian, Krum, Median, TrimmedMean
from fedensemble.testing.toy_problems import numbers

ENGINES = pytest.mark.parametrize("engine", ["loop", "vector"])
FEATURES, HIDDEN, STEPS = 4, 3, 3
RATE = {"lr": 0.02, "lr_decay": 0.7, "lr_decay_every": 3}
UNEQUAL, EQUAL = (7, 3, 5, 1, 9, 4, 6, 2, 8), (4,) * 12


def two_layers():
    body = nn.Linear(FEATURES, HIDDEN, bias=False)
    head = nn.Linear(HIDDEN, 1, bias=False)
    return nn.Sequential(OrderedDict(body=body, head=head))


def with_statistics():
    body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh())
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(HIDDEN, 1)))


def federation(sizes, algorithm, schedule, engine="loop", model=two_layers, **options):
    """Every batch is all that a client has, so that its order, which depends on modes, is none."""
    data = FederatedData.from_arrays(
        numbers(sum(sizes), FEATURES), numbers(sum(sizes), 1, word=2), list(sizes)
    )
    return Federation(
        model,
        data,
        algorithm,
        schedule=schedule,
        engine=engine,
        loss="mse",
        steps=STEPS,
        batch_size=max(sizes),
        dtype=torch.float64,
        seed=3,
        **options,
    )


def every_mode(modes):
    return Balanced(modes=modes, strata=3, clients_per_round=6)


def compare_with_one_mode(algorithm, shared, engine, **options):
    """All parameters are shared by three modes; the same clients train one mode."""
    many = federation(EQUAL, algorithm, every_mode(3), engine, shared=shared, **options)
    one = federation(EQUAL, algorithm, every_mode(1), engine, **options)
    for ours, theirs in zip(many.rounds(7), one.rounds(7), strict=True):
        assert ours.plan.client.tolist() == theirs.plan.client.tolist()
        assert len(set(ours.plan.mode.tolist())) == 3
        assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        for name, expected in one.state.modes.items():
            found = many.state.modes[name]
            torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-12, atol=1e-14)
    found, expected = many.state.buffers, one.state.buffers
    torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-12, atol=1e-14)


@ENGINES
@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(**RATE),
        FedAvg(weighting="uniform", **RATE),
        FedProx(mu=0.1, **RATE),
        FedAvgM(server_lr_decay=0.5, server_lr_decay_every=2, **RATE),
        FedAdagrad(**RATE),
        FedAdam(**RATE),
        FedYogi(**RATE),
        FedAc(mu=0.1, **RATE),
        QSGD(compressor="top-k", share=0.4, **RATE),  # the other compressors draw per mode
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_all_shared_is_one_model(algorithm, engine):
    compare_with_one_mode(algorithm, ["*"], engine)


@ENGINES
@pytest.mark.parametrize("shared", [["*"], ["*.weight", "*.bias"]])
def test_all_shared_is_one_model_with_running_statistics(shared, engine):
    compare_with_one_mode(FedAvg(**RATE), shared, engine, model=with_statistics)


@pytest.mark.parametrize(
    "aggregator",
    [Median(), TrimmedMean(), GeometricMedian(), Krum()],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.filterwarnings("ignore::fedensemble.errors.AggregatorWarning")
def test_all_shared_is_one_model_with_robust_aggregation(aggregator):
    compare_with_one_mode(FedAvgM(**RATE), ["*"], "loop", aggregator=aggregator, attack="sign-flip")


@ENGINES
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_a_shared_body_by_hand(weighting, engine):
    """FedAvgM with two strata for three modes: in every round a mode is idle."""
    schedule = Stratified(modes=3, strata=2, clients_per_round=4)
    algorithm = FedAvgM(beta=0.8, server_lr=0.3, weighting=weighting, **RATE)
    made = federation(UNEQUAL, algorithm, schedule, engine, shared=["body.*"])
    start = made.state.modes["theta"].numpy()
    cut, clients = FEATURES * HIDDEN, [made.data.client(i) for i in range(len(UNEQUAL))]
    body, heads = start[0, :cut].copy(), start[:, cut:].copy()
    body_speed, head_speed, idle = 0.0, [0.0] * 3, 0
    assert (start[:, :cut] == body).all() and not (heads[0] == heads[1]).all()

    def trained(client, body, head, lr):
        x, y = (t.numpy() for t in clients[client])
        for _ in range(STEPS):
            w = body.reshape(HIDDEN, FEATURES)
            error = 2 * (x @ w.T @ head - y[:, 0]) / len(x)
            body, head = (
                body - lr * np.outer(head, error @ x).ravel(),
                head - lr * error @ (x @ w.T),
            )
        return body, head

    for round in range(10):
        plan, lr = made.schedule.plan(made.state.schedule, round), 0.02 * 0.7 ** (round // 3)
        visits = list(zip(plan.client.tolist(), plan.mode.tolist(), strict=True))
        replies = [trained(client, body, heads[mode], lr) for client, mode in visits]
        weight = np.array([UNEQUAL[c] if weighting == "examples" else 1 for c, _ in visits], float)
        mean = np.average([reply[0] for reply in replies], 0, weight)
        body_speed = 0.8 * body_speed + mean - body
        body = body + 0.3 * body_speed
        for mode in range(3):
            own = [j for j, (_, trained_mode) in enumerate(visits) if trained_mode == mode]
            idle += not own
            if own:
                mean = np.average([replies[j][1] for j in own], 0, weight[own])
                head_speed[mode] = 0.8 * head_speed[mode] + mean - heads[mode]
                heads[mode] = heads[mode] + 0.3 * head_speed[mode]
        list(made.rounds(1))
        theta, velocity = (made.state.modes[name].numpy() for name in ("theta", "velocity"))
        expected = np.stack([np.concatenate([body, head]) for head in heads])
        np.testing.assert_allclose(theta, expected, rtol=0, atol=1e-10)
        np.testing.assert_allclose(velocity[:, :cut] - body_speed, 0, atol=1e-10)
    assert idle >= 10


def test_a_robust_body_is_that_of_all_visits():
    """The median of the body is over the visits of all modes, that of a head over its own."""
    schedule = Balanced(modes=2, strata=2, clients_per_round=6)
    options = {"aggregator": "median", "shared": ["body.*"]}
    made = federation((4, 3, 5, 6, 2, 7), FedAvg(lr=0.02), schedule, **options)
    request = made.next_request()
    members = made.engine.run_visits(*request).cohort.members
    list(made.rounds(1))
    cut, theta = FEATURES * HIDDEN, made.state.modes["theta"].numpy()
    replies, mode = members.uploads["theta"].numpy(), members.mode.numpy()
    for k in range(2):
        np.testing.assert_allclose(theta[k, :cut], np.median(replies[:, :cut], 0), atol=1e-12)
        own = np.median(replies[mode == k, cut:], 0)
        np.testing.assert_allclose(theta[k, cut:], own, atol=1e-12)
