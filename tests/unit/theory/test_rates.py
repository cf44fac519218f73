"""Theorem 1, the exponents in width and in K, and where they end, on federations of wide networks."""

from functools import cache

import numpy as np
import pytest
import torch

import fedensemble as fe
from fedensemble.data import load, partition
from fedensemble.errors import InputError
from fedensemble.models import Wide
from fedensemble.theory import gaussian_process as gp
from fedensemble.theory.bias_variance import (
    correlation,
    decompose,
    exponent_in_modes,
    finite_variance,
    variance_by_modes,
)
from fedensemble.theory.infinite_width import relu_kernels
from fedensemble.theory.rates import (
    drift,
    fit_power_law,
    largest_stable_rate,
    smallest_eigenvalue,
    training_error_bound,
)
from fedensemble.theory.tangent_kernel import ntk

CLIENTS, MODES, ROUNDS, STEPS, RATE = 6, 12, 36, 10, 0.3
ANGLES = torch.linspace(-3, 3, 40).double()
GRID = torch.stack([ANGLES.cos(), ANGLES.sin()], 1)


@cache
def data(conflict=0.0):
    source = load("circle", clients=CLIENTS, conflict=conflict)
    return partition(source, "natural", CLIENTS, 0)


def federation(width, seed=0, modes=MODES, conflict=0.0):
    return fe.Federation(
        lambda: Wide([2], 1, width=width),
        data(conflict),
        fe.FedAvg(lr=RATE),
        modes=modes,
        schedule="independent-kfold",
        clients_per_round=CLIENTS,
        strata=CLIENTS,
        steps=STEPS,
        batch_size=2,
        loss="mse",
        dtype=torch.float64,
        seed=seed,
    )


def errors(run):
    residual = run.ensemble.predict(run.data.x).modes[..., 0] - run.data.y[:, 0].double()
    return residual.square().mean(1)


@cache
def trained(width):
    """Distances of the modes to the linear model and of their kernels, after training."""
    run, x = federation(width), data().x.double()
    limit, cross = relu_kernels(x), relu_kernels(GRID, x)
    rows = list(torch.split(torch.arange(len(x)), 2))
    everybody = [torch.arange(CLIENTS)] * ROUNDS
    training = gp.finite_map(limit.ntk, cross.ntk, rows, everybody, rates=RATE, steps=STEPS)

    def outputs(inputs):
        return run.ensemble.predict(inputs).modes[..., 0]

    def kernels():
        return [ntk(run.ensemble.module(mode), x) for mode in range(MODES)]

    before, at_start, first = outputs(x), outputs(GRID), kernels()
    list(run.rounds(ROUNDS))
    linear = training.apply(before, at_start, data().y[:, 0].double())
    return {
        "distance": float((linear - outputs(GRID)).square().mean(1).sqrt().mean()),
        "to_limit": np.mean([drift(kernel, limit.ntk) for kernel in kernels()]),
        "drift": np.mean([drift(*pair) for pair in zip(kernels(), first, strict=True)]),
    }


WIDTHS = (64, 256, 1024, 4096)


@pytest.mark.parametrize("quantity", ["distance", "to_limit"])
def test_distances_to_the_limit_fall_with_the_root_of_the_width(quantity):
    law = fit_power_law(WIDTHS, [trained(width)[quantity] for width in WIDTHS])
    assert law.exponent == pytest.approx(-0.5, abs=0.15)
    assert trained(4096)[quantity] < 0.06


def test_the_kernel_drifts_no_more_than_the_theorem_says():
    law = fit_power_law(WIDTHS, [trained(width)["drift"] for width in WIDTHS])
    assert law.exponent < -0.5 + 0.15
    assert 0 < trained(4096)["drift"] < 0.02


def bound_of(run, start, rounds):
    x = torch.unique(run.data.x.double(), dim=0)
    return training_error_bound(
        float(start.mean()),
        smallest=smallest_eigenvalue(relu_kernels(x).ntk),
        points=len(run.data.x),
        epochs=torch.tensor(float(rounds * STEPS)),
        lr=RATE,
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_training_errors_stay_below_the_bound_of_theorem_1(seed):
    run = fe.Federation(
        lambda: Wide([2], 1, width=1024),
        data(),
        fe.FedAvg(lr=RATE),
        modes=CLIENTS,
        clients_per_round=CLIENTS,
        steps=STEPS,
        batch_size=2,
        loss="mse",
        dtype=torch.float64,
        seed=seed,
    )
    start = errors(run)
    for report in run.rounds(60):
        bound = bound_of(run, start, report.round)
        assert float(errors(run).mean()) <= bound
    assert float(bound) < 0.8 * float(start.mean())  # it says something


def test_clients_that_contradict_each_other_break_theorem_1():
    run = federation(256, modes=2, conflict=1.0)
    start = errors(run)
    list(run.rounds(60))
    # no function comes closer to targets y + 1/2 and y - 1/2 than 1/4
    assert 0.25 <= float(errors(run).mean()) < 0.3
    far = bound_of(run, start, 400)
    assert float(far) < 0.25  # the bound goes on to fall, and ends below every possible error


def test_bound_and_rate_by_hand():
    bound = training_error_bound(
        2.0, smallest=0.3, points=5, epochs=torch.tensor([0.0, 10.0]), lr=0.5, gradient_factor=1.0
    )
    assert bound.tolist() == pytest.approx([2.0, 2 * np.exp(-0.5 * 0.3 * 10 / 15)])
    singular = torch.diag(torch.tensor([0.0, 2.0, 5.0]))
    assert smallest_eigenvalue(singular) == 0
    assert smallest_eigenvalue(singular, nonzero=True) == 2
    # w <- w - lr 2 / n X^T (X w - y) is stable up to lr l_max < n
    assert largest_stable_rate(singular, points=3) == pytest.approx(3 / 5)


def exponent_in_modes_alone(members, sizes):
    return fit_power_law(sizes, variance_by_modes(members, sizes)).exponent


def test_the_variance_of_independent_modes_falls_with_one_over_k():
    """Modes differ in their starts only, so that modes of one federation are separate runs."""
    run = federation(128, modes=240)
    list(run.rounds(12))
    functions = run.ensemble.predict(GRID).modes[..., 0].numpy()
    members, sizes = functions.reshape(20, 12, -1), (1, 2, 3, 4, 6, 12)
    law = fit_power_law(sizes, variance_by_modes(members, sizes))
    assert law.exponent == pytest.approx(-1, abs=0.1)
    assert abs(correlation(members)) < 0.1
    exponent, error = exponent_in_modes(members, sizes)
    assert exponent == law.exponent
    # the standard error over bootstrap samples of the runs
    random = np.random.default_rng(1)
    samples = [members[random.integers(0, 20, 20)] for _ in range(200)]
    spread = np.std([exponent_in_modes_alone(sample, sizes) for sample in samples])
    assert 0.5 * spread < error < 2 * spread
    # If the modes of a run share something, such as the noise of their clients, the variance has a
    # floor. The same disturbance for all modes of a run, as large as half of their own variance:
    shared = np.random.default_rng(0).normal(size=(20, 1, len(GRID)))
    spread = np.sqrt(members.var((0, 1)).mean() / 2)
    correlated = members + spread * shared
    assert fit_power_law(sizes, variance_by_modes(correlated, sizes)).exponent > -0.6
    assert correlation(correlated) == pytest.approx(1 / 3, abs=0.12)


def test_bias_and_variance_of_averages():
    random = np.random.default_rng(0)
    members = 0.5 + random.normal(0, 1, (4000, 4, 3))
    split = decompose(members, np.zeros(3))
    assert split.bias == pytest.approx(0.5, abs=0.02)
    assert split.variance == pytest.approx(1 / 4, rel=0.05)
    assert variance_by_modes(members, [4])[0] == pytest.approx(split.variance * 4000 / 3999)
    with pytest.raises(InputError, match="sizes from 1 to 4"):
        variance_by_modes(members, [5])


def test_finite_variance_of_one_client_is_that_of_the_finite_map():
    """With one client nothing is averaged over who trains the mode."""
    rng = np.random.default_rng(3)
    phi, at = rng.normal(size=(4, 6)) / 2, rng.normal(size=(5, 6))
    found = finite_variance(
        at, [2 * phi.T @ phi / 4], [0.1, 0.2, 0.1], steps=3, idle=0.0, scale=1.5
    )
    left, right = torch.from_numpy(phi), torch.from_numpy(at)
    training = gp.finite_map(
        left @ left.T,
        right @ left.T,
        [torch.arange(4)],
        [torch.tensor([0])] * 3,
        rates=[0.1, 0.2, 0.1],
        steps=3,
    )
    prior = [1.5**2 * k for k in (left @ left.T, right @ left.T, right @ right.T)]
    process = training.process(*prior, torch.zeros(4).double())
    assert found == pytest.approx(float(process.covariance.diagonal().mean()))


def test_power_laws_need_two_points():
    law = fit_power_law([2, 4, 8, 16], [1.0, 0.6, 0.22, 0.13])
    slope, cut = np.polyfit(np.log([2, 4, 8, 16]), np.log([1.0, 0.6, 0.22, 0.13]), 1)
    assert (law.exponent, np.log(law.factor)) == pytest.approx((slope, cut))
    assert np.isnan(fit_power_law([1, 2], [1.0, 0.5]).error)
    for x, y in (([1, 1], [1.0, 1.0]), ([1, 2], [0.0, 1.0]), ([1, 2, 3], [1.0, 2.0])):
        with pytest.raises(InputError, match="power law"):
            fit_power_law(x, y)
