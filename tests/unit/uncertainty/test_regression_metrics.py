"""Scores of predictive distributions against definitions, numerical integration and scipy."""

import itertools

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats

from fedensemble import InputError, Prediction, evaluate
from fedensemble.uncertainty import (
    crps,
    gaussian_mixture_interval,
    gaussian_mixture_nll,
    gaussian_mixture_noise,
    interval_coverage,
    interval_score,
    interval_width,
)

CASES = range(200)


def case(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Members [K, n, 2] and targets [n, 2]; ties in a third of the cases."""
    rng = np.random.default_rng(seed)
    members = rng.normal(size=(rng.integers(1, 6), rng.integers(1, 9), 2))
    target = rng.normal(size=members.shape[1:])
    if seed % 3 == 0:
        members, target = members.round(), target.round() + 0.25 * (seed % 2)
    return torch.from_numpy(members), torch.from_numpy(target)


@pytest.mark.parametrize("seed", CASES)
def test_crps(seed):
    members, target = case(seed)
    found, values = crps(members, target), members.numpy()
    pairs = np.abs(values[:, None] - values[None]).mean((0, 1))
    expected = np.abs(values - target.numpy()).mean(0) - pairs / 2
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    # its other definition: the integral over z of (share of members <= z - [target <= z])²
    sample, y = np.sort(values[:, 0, 0]), float(target[0, 0])
    edges = np.sort(np.append(sample, y))
    integral = sum(
        (b - a) * ((sample <= (a + b) / 2).mean() - (y <= (a + b) / 2)) ** 2
        for a, b in itertools.pairwise(edges)
    )
    assert float(found[0, 0]) == pytest.approx(integral, abs=1e-6)
    metrics = evaluate(Prediction(members.mean(0), members, "regression", "outputs"), target)
    assert metrics["crps"] == pytest.approx(expected.mean(), abs=1e-12)


def test_one_member_has_the_absolute_error():
    members, target = case(7)
    torch.testing.assert_close(crps(members[:1], target), (members[0] - target).abs())


@pytest.mark.parametrize("seed", CASES)
def test_mixtures(seed):
    members, target = case(seed)
    noise = torch.tensor([0.3, 1.2], dtype=torch.float64)  # one per output
    found = gaussian_mixture_nll(members, target, noise).numpy()
    density = stats.norm.pdf(target.numpy(), members.numpy(), noise.numpy()).mean(0)
    np.testing.assert_allclose(found, -np.log(density), atol=1e-6)
    lower, upper = gaussian_mixture_interval(members, noise, 0.9)
    for end, probability in ((lower, 0.05), (upper, 0.95)):
        below = stats.norm.cdf(end.numpy(), members.numpy(), noise.numpy()).mean(0)
        np.testing.assert_allclose(below, probability, atol=1e-9)


def test_the_density_integrates_to_one():
    members = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)

    def density(y: float) -> float:
        target = torch.tensor([y], dtype=torch.float64)
        return float(torch.exp(-gaussian_mixture_nll(members, target, 0.7)))

    assert integrate.quad(density, -10, 15)[0] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_the_noise_maximizes_the_likelihood(seed):
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(100, 1))
    members = torch.from_numpy(truth + 0.3 * rng.normal(size=(1 + seed % 4, 100, 1)))
    target = torch.from_numpy(truth + 0.5 * rng.normal(size=(100, 1)))

    def loss(log_noise: float) -> float:
        return float(gaussian_mixture_nll(members, target, np.exp(log_noise)).mean())

    best = optimize.minimize_scalar(loss, bounds=(-3, 2), method="bounded", options={"xatol": 1e-9})
    found = gaussian_mixture_noise(members, target)
    assert found.shape == (1,)
    assert loss(float(found.log())) == pytest.approx(best.fun, abs=1e-9)
    assert float(found) == pytest.approx(np.exp(best.x), abs=1e-4)
    if len(members) == 1:  # the root mean squared error of the model
        assert float(found) == pytest.approx(float(((members - target) ** 2).mean().sqrt()))


@pytest.mark.parametrize("seed", CASES)
def test_intervals(seed):
    rng = np.random.default_rng(seed)
    lower, y = rng.normal(size=(2, rng.integers(1, 20))).round(seed % 3)
    upper = lower + np.abs(rng.normal(size=lower.shape)).round(1)
    level = rng.uniform(0.1, 0.95)
    ends = torch.from_numpy(lower), torch.from_numpy(upper)
    penalties = [
        u - low + 2 / (1 - level) * max(low - v, 0, v - u)
        for low, u, v in zip(lower, upper, y, strict=True)
    ]
    target = torch.from_numpy(y)
    assert interval_score(*ends, target, level) == pytest.approx(np.mean(penalties), abs=1e-6)
    inside = np.mean([low <= v <= u for low, u, v in zip(lower, upper, y, strict=True)])
    assert interval_coverage(*ends, target) == pytest.approx(inside)
    assert interval_width(*ends) == pytest.approx(np.mean(upper - lower))


def test_bad_input():
    members, target = torch.ones(2, 3), torch.ones(3)
    with pytest.raises(InputError, match=r"same shape .* got \(2, 3\) and \(4,\)"):
        crps(members, torch.ones(4))
    with pytest.raises(InputError, match="finite number above 0; got 0"):
        gaussian_mixture_nll(members, target, 0)
    with pytest.raises(InputError, match="each target is exactly the prediction"):
        gaussian_mixture_noise(members, target)
    with pytest.raises(InputError, match="above 0 and below 1"):
        gaussian_mixture_interval(members, 1.0, 0)
    with pytest.raises(InputError, match="level=1"):
        interval_score(target, target, target, 1)
    with pytest.raises(InputError, match="of one shape"):
        interval_coverage(target, target, torch.ones(4))
    with pytest.raises(InputError, match="above its upper end"):
        interval_width(target, target - 1)
