"""An average together with what else decides which models predict: deployed and shared models."""

import pytest
import torch

import fedensemble as fe
from fedensemble import EMA, Snapshots, Stratified
from fedensemble.algorithms import FedCross
from fedensemble.testing.toy_problems import classification, small_model

ROUNDS = 7


def federation(**arguments):
    return fe.Federation(
        small_model,
        classification(),
        dtype=torch.float64,
        seed=3,
        **{"modes": 3, "clients_per_round": 3, **arguments},
    )


@pytest.mark.parametrize("deploy", ["mean", "ensemble"])
def test_deployed_models_are_made_of_the_averages(deploy):
    plain = federation(algorithm=FedCross(deploy=deploy))
    states = []
    for _ in plain.rounds(ROUNDS):
        states.append(plain.state.modes["theta"])
    averaged = states[0]
    for t, theta in enumerate(states[1:], 1):
        decay = min(0.9, t / (t + 1))
        averaged = decay * averaged + (1 - decay) * theta
    made = federation(algorithm=FedCross(deploy=deploy), average=EMA(decay=0.9))
    list(made.rounds(ROUNDS))
    expected = averaged.mean(0, keepdim=True) if deploy == "mean" else averaged
    torch.testing.assert_close(made.ensemble.theta, expected, rtol=0, atol=1e-12)
    last = made.last_ensemble.theta
    torch.testing.assert_close(last, plain.ensemble.theta, rtol=0, atol=0)


def test_each_snapshot_of_a_deployed_mean_is_the_mean_of_snapshots():
    plain = federation(algorithm=FedCross())
    means = []
    for _ in plain.rounds(ROUNDS):
        means.append(plain.ensemble.theta[0])
    made = federation(algorithm=FedCross(), average=Snapshots(count=2, every=1))
    list(made.rounds(ROUNDS))
    assert made.ensemble.predictors.shape[:2] == (1, 2)
    found = sorted(model.sum().item() for model in made.ensemble.predictors[0])
    assert found == pytest.approx(sorted(mean.sum().item() for mean in means[-2:]), abs=1e-12)


def test_averages_of_shared_parameters_are_shared():
    """Also those of modes that had no clients: their shared parameters have moved."""
    schedule = Stratified(modes=3, strata=2, clients_per_round=2)
    first = next(name for name, _ in small_model().named_parameters())
    made = federation(schedule=schedule, shared=[first], average=EMA(decay=0.5))
    trained = [len(report.trained) for report in made.rounds(ROUNDS)]
    assert min(trained) < 3
    modules = [dict(made.ensemble.module(k).named_parameters()) for k in range(3)]
    for other in modules[1:]:
        torch.testing.assert_close(other[first], modules[0][first], rtol=0, atol=1e-12)
    assert any(not torch.equal(modules[0][n], modules[1][n]) for n in modules[0] if n != first)
