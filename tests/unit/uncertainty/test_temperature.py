"""Temperatures that are fitted by sums: equal to the minimum of the likelihood itself."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from fedensemble import InputError
from fedensemble.uncertainty.temperature import (
    LOG_TEMPERATURES,
    combine_members,
    fit_temperature,
    log_mean,
    scale_members,
    scaled_mean,
    temperature_sums,
)


def nll(logits: torch.Tensor, target: torch.Tensor, log_temperature: float) -> float:
    scaled = logits.double() * math.exp(-log_temperature)
    return float(torch.nn.functional.cross_entropy(scaled, target, reduction="sum"))


def test_sums_are_the_likelihood_and_its_derivatives():
    rng = torch.Generator().manual_seed(0)
    logits, target = torch.randn(30, 4, generator=rng), torch.randint(4, (30,), generator=rng)
    sums = temperature_sums(logits, target)
    for index in (0, 8, 20):
        s = torch.tensor(float(LOG_TEMPERATURES[index]), dtype=torch.double, requires_grad=True)
        total = torch.nn.functional.cross_entropy(
            logits.double() * torch.exp(-s), target, reduction="sum"
        )
        (slope,) = torch.autograd.grad(total, s, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, s)
        expected = torch.stack([total.detach(), slope.detach(), curvature])
        torch.testing.assert_close(sums[index], expected, rtol=1e-9, atol=1e-9)


def test_federated_temperature_is_the_central_one():
    rng = torch.Generator().manual_seed(1)
    inside = 0
    for case in range(200):
        rows, classes = 20 + case, 2 + case % 7
        scale = 10 ** float(torch.empty(1).uniform_(-0.5, 1, generator=rng))
        truth = torch.randn(rows, classes, generator=rng)
        target = (truth + torch.randn(rows, classes, generator=rng)).argmax(-1)
        logits = scale * truth
        if case % 5 == 0:  # ties: few different logits
            logits = logits.round()
        parts = torch.randint(6, (rows,), generator=rng)  # six clients, some with few rows
        sums = sum(
            temperature_sums(logits[parts == part], target[parts == part]) for part in range(6)
        )
        temperature, value = fit_temperature(sums)
        ends = float(LOG_TEMPERATURES[0]), float(LOG_TEMPERATURES[-1])
        central = minimize_scalar(
            lambda s, z=logits, y=target: nll(z, y, s),
            bounds=ends,
            method="bounded",
            options={"xatol": 1e-9},
        )
        inside += ends[0] + 1e-3 < central.x < ends[1] - 1e-3
        assert temperature == pytest.approx(math.exp(central.x), rel=1e-4)
        assert value == pytest.approx(central.fun, rel=1e-6)
    assert inside > 150


def test_ends_of_the_range():
    logits = torch.tensor([[3.0, 0.0]]).repeat(5, 1)
    always_right, never = torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.int64)
    smallest = fit_temperature(temperature_sums(logits, always_right))[0]
    assert smallest == pytest.approx(math.exp(-2))
    largest = fit_temperature(temperature_sums(logits, never))[0]
    assert largest == pytest.approx(math.exp(3))
    equal = fit_temperature(temperature_sums(torch.zeros(5, 2), never))
    assert equal == pytest.approx((1.0, 5 * math.log(2)))


def test_sums_that_are_none():
    with pytest.raises(InputError, match="needs the finite sums"):
        fit_temperature(torch.full((21, 3), math.nan))
    with pytest.raises(InputError, match="needs the finite sums"):
        fit_temperature(torch.zeros(3, 3))


@pytest.mark.parametrize("by_logits", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_scaling_of_the_mean_and_of_members(by_logits, samples):
    rng = torch.Generator().manual_seed(2)
    outputs = 3 * torch.randn(4, samples, 7, 5, generator=rng, dtype=torch.double)
    members = outputs.softmax(-1)
    mean = outputs.mean((0, 1)).softmax(-1) if by_logits else members.mean((0, 1))
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(log_mean(outputs, by_logits=by_logits).exp(), mean, **close)
    powered = mean ** (1 / 2.5)
    torch.testing.assert_close(
        scaled_mean(outputs, 2.5, by_logits=by_logits),
        powered / powered.sum(-1, keepdim=True),
        **close,
    )
    scaled = scale_members(outputs, (1.0, 2.0, 3.0, 4.0))
    torch.testing.assert_close(scaled[2], outputs[2] / 3, **close)
    torch.testing.assert_close(
        combine_members(outputs, members, by_logits=by_logits), mean, **close
    )


def test_probabilities_of_zero_have_a_logarithm():
    outputs = torch.tensor([[[[0.0, -2000.0]]], [[[0.0, -3000.0]]]])
    assert np.allclose(log_mean(outputs, by_logits=False)[0], [0, -2000 - math.log(2)])
