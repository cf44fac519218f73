"""The part of the server's step in which modes interact: when it is called, and what if it fails."""

import pytest
import torch

from fedensemble import Balanced, DivergedError, FedAvg, Federation, IndependentKFold
from fedensemble.algorithms import FedCross, FedSDD
from fedensemble.core.aggregator import gathering
from fedensemble.testing.toy_problems import (
    classification,
    small_federation,
    small_model,
    train,
)


def federation_of(method, schedule, **options):
    return Federation(
        small_model, classification(), method, schedule=schedule, dtype=torch.float64, **options
    )


def test_idle_modes_and_their_counts_are_seen():
    seen = []

    class Watches(FedAvg):
        def couple(self, modes, buffers, cohort):
            seen.append((modes["theta"].clone(), cohort.count.flatten().tolist(), cohort.round))
            return {"theta": modes["theta"] + 1}, buffers

    assert Watches.couples
    federation = small_federation(Watches(), "vector", modes=4, strata=2)
    for round in range(3):
        before = federation.state.modes["theta"]
        report = next(federation.rounds(1))
        theta, count, number = seen[round]
        idle = [mode for mode in range(4) if mode not in report.trained]
        assert number == round and idle and all((count[m] == 0) == (m in idle) for m in range(4))
        assert torch.equal(theta[idle], before[idle])
        assert torch.equal(federation.state.modes["theta"], theta + 1)


def test_a_step_that_is_not_finite_names_the_algorithm_and_changes_nothing():
    schedule = Balanced(modes=2, strata=2, clients_per_round=4)
    federation = federation_of(FedSDD(server_lr=1e308), schedule)
    before = federation.tensors()
    with pytest.raises(DivergedError, match="'fedsdd' gave nan or infinity in mode 0 at round 1"):
        train(federation, 1)
    assert federation.round == 0
    for name, value in before.items():
        assert torch.equal(federation.tensors()[name], value)


def test_modes_that_share_clients_interact_too():
    schedule = IndependentKFold(modes=3, clients_per_round=2)
    method = FedCross(alpha=0.5, deploy="ensemble", same_start=False)
    federation, apart = (federation_of(one, schedule) for one in (method, FedAvg()))
    train(federation, 1)
    train(apart, 1)
    theta = apart.state.modes["theta"]
    expected = 0.5 * theta + 0.5 * theta.roll(-1, 0)
    torch.testing.assert_close(federation.state.modes["theta"], expected, rtol=0, atol=1e-12)


def test_a_robust_aggregator_comes_before():
    method = FedCross(alpha=0.5, same_start=False)
    schedule = Balanced(modes=2, strata=2, clients_per_round=6)
    mixed, apart = (federation_of(one, schedule, aggregator="median") for one in (method, FedAvg()))
    assert gathering(method).couples
    train(mixed, 1)
    train(apart, 1)
    mean = apart.state.modes["theta"].mean(0).expand(2, -1)
    torch.testing.assert_close(mixed.state.modes["theta"], mean, rtol=0, atol=1e-12)


def test_same_start_copies_running_statistics_and_frozen_parameters():
    theta, buffers = FedCross().start_modes(torch.rand(3, 5), torch.rand(3, 2))
    assert bool((theta == theta[0]).all() and (buffers == buffers[0]).all())
