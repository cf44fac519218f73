"""Anchored modes of a linear model are samples of its exact posterior; without anchors they are not."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble import prng
from fedensemble.algorithms import Anchored
from fedensemble.core.visits.visit_keys import visit_key
from fedensemble.engines.local.run_visits import (
    concatenate_data,
    differing_hyperparameters,
    run_visits,
)
from fedensemble.errors import InputError

MODES, NOISE, ALPHA = 120, 0.7, 2.0
SIZES = (2, 5, 3)  # unequal clients


class Linear(nn.Linear):
    """A linear model of three features; modes start in the prior N(0, 1 / alpha)."""

    def __init__(self):
        super().__init__(3, 1, bias=False)
        nn.init.normal_(self.weight, std=ALPHA**-0.5)


def data():
    rng = np.random.default_rng(0)
    clients = []
    for size in SIZES:
        x = rng.uniform(-1, 1, (size, 1))
        features = np.concatenate([np.ones_like(x), x, x**2], 1)
        clients.append((features, np.sin(3 * x) + NOISE * rng.normal(size=x.shape)))
    return fe.FederatedData.from_clients(clients)


def federation(algorithm, modes, engine="vector", seed=0):
    return fe.Federation(
        Linear,
        data(),
        algorithm,
        modes=modes,
        clients_per_round=len(SIZES),
        schedule="independent-kfold",
        steps=1,
        batch_size=max(SIZES),
        loss="mse",
        dtype=torch.float64,
        engine=engine,
        seed=seed,
    )


@cache
def train(anchor=True, target_noise=NOISE, engine="vector", modes=MODES, rounds=120):
    """The modes' weights at the start and after training with all clients in every round."""
    algorithm = Anchored(
        lr=0.5, prior_precision=2 * NOISE**2 * ALPHA, anchor=anchor, target_noise=target_noise
    )
    run = federation(algorithm, modes, engine)
    start = run.state.modes["theta"].numpy().copy()
    list(run.rounds(rounds))
    return start, run.state.modes["theta"].numpy()


def exact():
    """Features, targets, and mean and covariance of p(w | D) of Bayesian linear regression."""
    phi, y = (part.double().numpy() for part in (data().x, data().y))
    covariance = np.linalg.inv(phi.T @ phi / NOISE**2 + ALPHA * np.eye(3))
    return phi, y[:, 0], covariance @ phi.T @ y[:, 0] / NOISE**2, covariance


def distances(modes, mean, covariance):
    """Squared z-scores of the sample mean, and the whitened sample covariance: 0 and I if right."""
    root = np.linalg.cholesky(np.linalg.inv(covariance))
    white = (modes - mean) @ root
    return len(modes) * white.mean(0) ** 2, np.cov(white.T)


def test_anchored_modes_are_samples_of_the_exact_posterior():
    _, _, mean, covariance = exact()
    score, spread = distances(train()[1], mean, covariance)
    assert score.max() < 9  # three standard deviations
    # the standard error of a variance is sqrt(2 / 120) = 0.13, of a covariance 0.09
    np.testing.assert_allclose(spread, np.eye(3), atol=0.35)


def test_each_mode_solves_its_own_problem_to_rounding():
    """With the noise that `prng` gives the mode for client and example, and the mode's own start."""
    phi, y, _, _ = exact()
    start, modes = train(modes=3, rounds=400)
    alpha = 2 * NOISE**2 * ALPHA
    for mode in range(3):
        noise = []
        for client, size in enumerate(SIZES):
            key = visit_key("target noise", 0, 0, torch.tensor(client), torch.tensor(mode))
            noise += [float(prng.normal(prng.fold_in(key, j), 1)) for j in range(size)]
        target = y + NOISE * np.array(noise)
        solution = np.linalg.solve(
            2 * phi.T @ phi + alpha * np.eye(3), 2 * phi.T @ target + alpha * start[mode]
        )
        np.testing.assert_allclose(modes[mode], solution, atol=1e-8)


def test_without_anchors_or_without_noise_the_spread_is_too_small():
    _, _, mean, covariance = exact()
    _, modes = train(anchor=False, target_noise=0.0, rounds=400, modes=4)
    score, collapsed = distances(modes, mean, covariance)
    assert score.max() < 1e-8 and np.abs(collapsed).max() < 1e-8  # one minimum for all modes
    for options in ({"anchor": False}, {"target_noise": 0.0}):
        score, spread = distances(train(**options)[1], mean, covariance)
        assert score.max() < 9  # the mean is right,
        assert np.linalg.eigvalsh(spread).min() < 0.6  # the spread is not


def test_without_noise_of_targets_the_covariance_is_that_of_the_docstring():
    _, _, mean, covariance = exact()
    _, spread = distances(train(target_noise=0.0)[1], mean, ALPHA * covariance @ covariance)
    np.testing.assert_allclose(spread, np.eye(3), atol=0.35)


def test_engines_agree():
    for a, b in zip(train(modes=3, rounds=5), train(modes=3, rounds=5, engine="loop"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("options", [{"prior_precision": -1.0}, {"target_noise": -0.1}])
def test_wrong_options(options):
    with pytest.raises(InputError, match=next(iter(options))):
        Anchored(**options)


def test_noise_of_targets_is_for_regression():
    clients = [([[0.0], [1.0]], [0, 1])] * 2
    with pytest.raises(InputError, match="classification"):
        fe.Federation(
            lambda: nn.Linear(1, 2),
            fe.FederatedData.from_clients(clients),
            Anchored(target_noise=0.1),
        )


def test_runs_trained_in_one_batch_keep_their_own_noise():
    """Of their own seed, strength and place of the data, also if the runs differ in these."""
    runs = [federation(Anchored(target_noise=0.1 + seed), 2, seed=seed) for seed in (0, 1)]
    requests = [run.next_request() for run in runs]
    alone = [run.engine.run_visits(*request) for run, request in zip(runs, requests, strict=True)]
    concatenate_data([run.engine for run in runs])
    together = run_visits([run.engine for run in runs], requests)
    for single, batched in zip(alone, together, strict=True):
        assert torch.allclose(single.uploads["theta"], batched.uploads["theta"], atol=1e-12)
    with pytest.raises(ValueError, match="noise of the targets"):
        differing_hyperparameters([Anchored(target_noise=0.1), Anchored()])
