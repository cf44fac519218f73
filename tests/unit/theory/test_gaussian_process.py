"""The process of Theorem 2, after finitely many rounds and in the limit, against simulations."""

import numpy as np
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble.errors import InputError
from fedensemble.theory import gaussian_process as gp
from fedensemble.theory.bias_variance import limit_variance
from fedensemble.theory.infinite_width import Kernels

SIZES, FEATURES, SEED = (3, 1, 2, 4), 14, 5
RATE, STEPS, ROUNDS, MODES = 0.1, 3, 11, 2


def problem():
    """Features at training and other inputs, targets and the rows of unequal clients."""
    rng = np.random.default_rng(1)
    phi, at = (torch.from_numpy(rng.normal(size=(n, FEATURES)) / 3) for n in (sum(SIZES), 5))
    rows = list(torch.split(torch.arange(sum(SIZES)), SIZES))
    return phi, at, torch.from_numpy(rng.normal(size=sum(SIZES))), rows


def federation(decay=1.0):
    phi, _, targets, rows = problem()
    return fe.Federation(
        lambda: nn.Linear(FEATURES, 1, bias=False),
        fe.FederatedData.from_clients([(phi[r], targets[r, None]) for r in rows]),
        fe.FedAvg(lr=RATE, lr_decay=decay, lr_decay_every=2),
        modes=MODES,
        strata=2,
        clients_per_round=3,  # some clients are idle, and so is sometimes a mode
        steps=STEPS,
        batch_size=max(SIZES),
        loss="mse",
        dtype=torch.float64,
        seed=SEED,
    )


@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_the_finite_map_is_what_a_federation_of_linear_models_computes(decay):
    phi, at, targets, rows = problem()
    run = federation(decay)
    start = run.state.modes["theta"].clone()
    list(run.rounds(ROUNDS))
    rates = [run.algorithm.learning_rate(number) for number in range(ROUNDS)]
    for mode in range(MODES):
        training = gp.finite_map(
            phi @ phi.T,
            at @ phi.T,
            rows,
            gp.visits(run.schedule, len(SIZES), SEED, ROUNDS, mode),
            rates=rates if decay < 1 else RATE,
            steps=STEPS,
        )
        found = training.apply(phi @ start[mode], at @ start[mode], targets)
        assert torch.allclose(found, at @ run.state.modes["theta"][mode], atol=1e-8, rtol=0)


@pytest.mark.parametrize("factor", [gp.MSE, gp.HALF_MSE])
def test_gradient_flow_is_the_matrix_exponential_of_each_client(factor):
    """In weight space: w - w_i solves dw/ds = -g / n_i Phi_i^T (Phi_i w - y_i)."""
    phi, at, targets, rows = problem()
    rounds = gp.visits(federation().schedule, len(SIZES), SEED, ROUNDS, 0)
    start = torch.randn(FEATURES, generator=torch.Generator().manual_seed(0)).double()
    weights = start
    for visitors in rounds:
        total, parts = sum(SIZES[i] for i in visitors), []
        for i in visitors.tolist():
            own, size = phi[rows[i]], SIZES[i]
            # Augmented with the constant term, so that one exponential solves the affine equation.
            system = torch.zeros(FEATURES + 1, FEATURES + 1).double()
            system[:-1, :-1] = -factor / size * own.T @ own
            system[:-1, -1] = factor / size * own.T @ targets[rows[i]]
            flow = torch.matrix_exp(0.9 * system)
            parts.append(size / total * (flow @ torch.cat([weights, torch.ones(1).double()]))[:-1])
        weights = sum(parts) if parts else weights
    training = gp.finite_map(
        phi @ phi.T, at @ phi.T, rows, rounds, rates=0.9, gradient_factor=factor
    )
    found = training.apply(phi @ start, at @ start, targets)
    assert torch.allclose(found, at @ weights, atol=1e-8, rtol=0)
    assert float((found - at @ start).abs().max()) > 0.1


def test_many_rounds_reach_the_limit_of_theorem_2():
    phi, at, _, rows = problem()
    rounds = [torch.arange(4)] * 4000
    training = gp.finite_map(phi @ phi.T, at @ phi.T, rows, rounds, rates=3.0)
    limit = gp.limit_map(phi @ phi.T, at @ phi.T)
    assert torch.allclose(training.at_test, limit.at_test, atol=1e-6)
    assert torch.allclose(training.at_train, torch.eye(len(phi)).double(), atol=1e-6)


def test_the_process_has_the_moments_of_samples_through_the_map():
    """Mean and covariance of f_0 -> f_0 + M (y + e - f_0), by sampling."""
    phi, at, targets, rows = problem()
    other = torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(1)).double() / 3
    a, b = phi @ other, at @ other  # the covariance of the start is not the tangent kernel
    training = gp.finite_map(phi @ phi.T, at @ phi.T, rows, [torch.arange(4)] * 3, rates=0.5)
    process = training.process(a @ a.T, b @ a.T, b @ b.T, targets, target_noise=0.4)
    random = torch.Generator().manual_seed(2)
    weights = torch.randn(40_000, FEATURES, generator=random).double()
    noisy = targets + 0.4 * torch.randn(40_000, len(targets), generator=random).double()
    samples = training.apply(weights @ a.T, weights @ b.T, noisy)
    deviation = process.standard_deviation
    assert ((samples.mean(0) - process.mean).abs() <= 4 * deviation / 200).all()
    scale = deviation[:, None] * deviation
    assert ((samples.T.cov() - process.covariance).abs() <= 6 * scale / 200).all()
    scores = process.principal_scores(samples, share=1e-6)
    assert torch.allclose(scores.T.cov(), torch.eye(5).double(), atol=0.03)


def test_theorem_2_is_kernel_regression_with_a_sandwich_covariance():
    phi, at, targets, _ = problem()
    theta, cross, both = phi @ phi.T, at @ phi.T, at @ at.T
    scale = 1.7  # K = scale^2 Theta, the paper's special case
    kernels = [Kernels(scale**2 * k, k) for k in (theta, cross, both)]
    process = gp.posterior(*kernels, targets)
    inverse = torch.linalg.inv(theta)
    assert torch.allclose(process.mean, cross @ inverse @ targets)
    expected = scale**2 * (both - cross @ inverse @ cross.T)
    assert torch.allclose(process.covariance, expected)
    # the helper behind Table 1 computes the mean variance from the features
    found = limit_variance(at.numpy(), phi.numpy(), scale)
    assert found == pytest.approx(float(expected.diagonal().mean()))


def test_exact_regression_is_the_bayesian_linear_model():
    phi, at, targets, _ = problem()
    alpha, noise = 2.0, 0.3
    process = gp.regression(
        *(k / alpha for k in (phi @ phi.T, at @ phi.T, at @ at.T)), targets, noise
    )
    covariance = torch.linalg.inv(phi.T @ phi / noise**2 + alpha * torch.eye(FEATURES).double())
    assert torch.allclose(process.mean, at @ covariance @ phi.T @ targets / noise**2)
    assert torch.allclose(process.covariance, at @ covariance @ at.T)
    # sample-then-optimise with noisy targets, in function space, is the same process
    training = gp.limit_map(phi @ phi.T, at @ phi.T, ridge=alpha * noise**2)
    prior = [k / alpha for k in (phi @ phi.T, at @ phi.T, at @ at.T)]
    sampled = training.process(*prior, targets, target_noise=noise)
    assert torch.allclose(sampled.mean, process.mean)
    assert torch.allclose(sampled.covariance, process.covariance)


def test_a_singular_kernel_has_no_limit():
    phi, at, _, _ = problem()
    twice = torch.cat([phi, phi[:1]])
    with pytest.raises(InputError, match="ridge"):
        gp.limit_map(twice @ twice.T, at @ twice.T)
    assert torch.isfinite(gp.limit_map(twice @ twice.T, at @ twice.T, ridge=0.1).at_test).all()
