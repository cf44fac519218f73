"""Weights of modes per client, against SciPy's solvers and closed forms."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedensemble.personal.weights import (
    mixture_weights,
    posterior_weights,
    regression_weights,
    select_weights,
)

SIZES = (0, 1, 2, 7, 30)


def rows(modes, seed=0, sizes=SIZES, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    loss = (spread * torch.randn(len(owner), modes, generator=generator, dtype=torch.float64)).exp()
    return loss, owner


def scipy_minimum(value, modes):
    """The best of two starts of SLSQP on the simplex."""
    found = [
        minimize(
            value,
            start,
            method="SLSQP",
            bounds=[(1e-13, 1)] * modes,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            options={"ftol": 1e-15, "maxiter": 2000},
        )
        for start in (np.full(modes, 1 / modes), np.eye(modes)[0] * 0.9 + 0.1 / modes)
    ]
    return min(result.fun for result in found if abs(result.x.sum() - 1) < 1e-6)


@pytest.mark.parametrize("modes", [1, 2, 3, 6])
@pytest.mark.parametrize("prior", [0.0, 1.0, 5.0])
def test_mixtures_are_as_good_as_those_of_scipy(modes, prior):
    loss, owner = rows(modes, seed=modes, spread=1.5)
    found = mixture_weights(loss, owner, len(SIZES), prior=prior)
    assert float(found.gap.max()) < 1e-6
    np.testing.assert_allclose(found.weights.sum(1), 1, atol=1e-12)
    assert bool((found.weights >= 0).all())
    for client, size in enumerate(SIZES):
        own = loss[owner == client].numpy()
        if not size:
            np.testing.assert_array_equal(found.weights[client], np.full(modes, 1 / modes))
            continue

        def value(w, own=own, size=size):
            fit = np.log(np.maximum(np.exp(-own) @ w, 1e-300)).sum()
            pull = prior / modes * np.log(np.maximum(w, 1e-300)).sum() if prior else 0.0
            return -(fit + pull) / (size + prior)

        assert value(found.weights[client].numpy()) <= scipy_minimum(value, modes) + 1e-8


@pytest.mark.parametrize("prior", [0.0, 2.0])
def test_weights_for_regression_are_as_good_as_those_of_scipy(prior):
    modes, generator = 3, torch.Generator().manual_seed(1)
    owner = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    outputs = torch.randn(len(owner), modes, 2, generator=generator, dtype=torch.float64)
    target = torch.randn(len(owner), 2, generator=generator, dtype=torch.float64)
    found = regression_weights(outputs, target, owner, len(SIZES), prior=prior).weights
    for client, size in enumerate(SIZES[1:], 1):
        o, y = outputs[owner == client].numpy(), target[owner == client].numpy()
        equal = ((o.mean(1) - y) ** 2).mean()

        def value(w, o=o, y=y, size=size, equal=equal):
            error = ((np.einsum("nkd,k->nd", o, w) - y) ** 2).mean()
            pull = prior / modes * np.log(np.maximum(w, 1e-300)).sum() if prior else 0.0
            return (size * error / equal - pull) / (size + prior)

        assert value(found[client].numpy()) <= scipy_minimum(value, modes) + 1e-8


def test_one_row():
    """Without a prior all weight goes to one mode; with it, a row does not decide."""
    loss, owner = torch.tensor([[0.1, 2.0]], dtype=torch.float64), torch.tensor([0])
    np.testing.assert_allclose(
        mixture_weights(loss, owner, 1, prior=0).weights, [[1, 0]], atol=1e-7
    )
    # By hand: with r = p_2 / p_1, the derivative (1 - r)/(w + r(1 - w)) + 1/2w - 1/2(1 - w) is 0.
    w = float(mixture_weights(loss, owner, 1).weights[0, 0])
    r = np.exp(-1.9)
    assert (1 - r) / (w + r * (1 - w)) + 0.5 / w - 0.5 / (1 - w) == pytest.approx(0, abs=1e-6)


def test_weights_do_not_underflow():
    loss = torch.tensor([[2000.0, 2001.0], [2000.0, 1990.0]], dtype=torch.float64)
    found = mixture_weights(loss, torch.tensor([0, 1]), 2, prior=0.0).weights
    np.testing.assert_allclose(found, [[1, 0], [0, 1]], atol=1e-6)
    np.testing.assert_allclose(
        posterior_weights(loss, torch.tensor([0, 0]), 1)[0, 0], np.exp(-9), rtol=1e-3
    )


@given(st.integers(1, 5), st.integers(0, 50), st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_choices_and_posteriors_by_brute_force(modes, seed, sizes):
    loss, owner = rows(modes, seed, sizes)
    selected, posterior = (
        rule(loss, owner, len(sizes)) for rule in (select_weights, posterior_weights)
    )
    for client in range(len(sizes)):
        own = loss[owner == client].numpy()
        if len(own):
            expected = np.eye(modes)[min(range(modes), key=lambda k: own[:, k].sum())]
            np.testing.assert_array_equal(selected[client], expected)
        else:
            np.testing.assert_allclose(selected[client], np.full(modes, 1 / modes))
        weight = np.exp(-own.sum(0) + own.sum(0).min())
        np.testing.assert_allclose(posterior[client], weight / weight.sum(), rtol=1e-9)


def test_renamed_modes_are_only_renamed():
    loss, owner = rows(4, seed=3)
    order = [2, 0, 3, 1]
    for rule in (select_weights, posterior_weights, lambda *a: mixture_weights(*a).weights):
        first, second = rule(loss, owner, len(SIZES)), rule(loss[:, order], owner, len(SIZES))
        np.testing.assert_allclose(first[:, order], second, atol=1e-5)
