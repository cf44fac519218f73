"""The losses of a student, against SciPy and sums over examples and classes."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import nn

from fedensemble.distillation.objectives import (
    SMOOTHING,
    DirichletLikelihood,
    SoftCrossEntropy,
    SquaredError,
)
from fedensemble.testing.toy_problems import numbers
from fedensemble.uncertainty.out_of_distribution import shuffle_features
from fedensemble.uncertainty.scores import MAX_TOTAL, expected_entropy


def softmax(z):
    z = np.exp(np.asarray(z) - np.max(z))
    return z / z.sum()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
def test_soft_cross_entropy(temperature):
    outputs, probabilities = numbers(6, 3), numbers(6, 3, word=1).softmax(-1)
    loss = SoftCrossEntropy("cross_entropy", temperature)(outputs, probabilities)
    for row in range(6):
        target = softmax(np.log(probabilities[row].numpy()) / temperature)
        student = softmax(outputs[row].numpy() / temperature)
        expected = -(temperature**2) * sum(
            q * math.log(p) for q, p in zip(target, student, strict=True)
        )
        assert float(loss[row]) == pytest.approx(expected, rel=1e-12)


def test_sequences_are_means_over_positions_and_bce_has_two_classes():
    outputs, probabilities = numbers(4, 5, 3), numbers(4, 5, 3, word=1).softmax(-1)
    whole = SoftCrossEntropy("cross_entropy")(outputs, probabilities)
    parts = SoftCrossEntropy("cross_entropy")(outputs.flatten(0, 1), probabilities.flatten(0, 1))
    torch.testing.assert_close(whole, parts.reshape(4, 5).mean(1))
    logit, positive = numbers(6), numbers(6, word=1).sigmoid()
    teacher = torch.stack([1 - positive, positive], -1)
    expected = nn.functional.binary_cross_entropy_with_logits(logit, positive, reduction="none")
    torch.testing.assert_close(SoftCrossEntropy("bce")(logit, teacher), expected)


def test_zero_probabilities_are_finite():
    outputs = torch.zeros(1, 3, requires_grad=True)
    certain = torch.tensor([[1.0, 0.0, 0.0]])
    for loss in (
        SoftCrossEntropy("cross_entropy", 3.0)(outputs, certain),
        DirichletLikelihood("cross_entropy", 3.0)(outputs, certain.unsqueeze(1)),
    ):
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(outputs.grad).all()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_dirichlet_likelihood_is_that_of_scipy(temperature):
    rows, members, classes = 5, 4, 3
    outputs = numbers(rows, classes)
    teacher = numbers(rows, members, classes, word=1).softmax(-1)
    loss = DirichletLikelihood("cross_entropy", temperature)(outputs, teacher)
    for row in range(rows):
        alpha = np.exp(outputs[row].numpy() / temperature)
        total = 0.0
        for member in teacher[row].numpy():
            drawn = softmax(np.log(member) / temperature)
            drawn = (1 - SMOOTHING) * drawn + SMOOTHING / classes
            total -= stats.dirichlet.logpdf(drawn / drawn.sum(), alpha)
        assert float(loss[row]) == pytest.approx(total / members, rel=1e-9)


def test_the_dirichlet_that_drew_the_members_has_the_smallest_loss():
    alpha = np.array([4.0, 2.0, 1.0])
    drawn = torch.from_numpy(np.random.default_rng(0).dirichlet(alpha, 20000)).unsqueeze(0)
    logits = torch.zeros(1, 3, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=100)
    objective = DirichletLikelihood("cross_entropy")

    def closure():
        optimizer.zero_grad()
        loss = objective(logits, drawn).sum()
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    np.testing.assert_allclose(logits.detach().exp().numpy()[0], alpha, rtol=0.05)


def test_squared_error():
    outputs, teacher = numbers(4, 2), numbers(4, 2, word=1)
    expected = ((outputs - teacher).numpy() ** 2).mean(1)
    np.testing.assert_allclose(SquaredError()(outputs, teacher), expected)


@pytest.mark.parametrize("alpha", [(0.3, 0.8), (5.0, 1.0), (200.0, 300.0)])
def test_expected_entropy_is_the_integral_over_the_beta_distribution(alpha):
    beta = stats.beta(*alpha)
    integral = integrate.quad(
        lambda p: beta.pdf(p) * (special.entr(p) + special.entr(1 - p)), 0, 1, limit=200
    )[0]
    total = sum(alpha)
    members = torch.tensor([[[a / total for a in alpha]]], dtype=torch.double)
    energy = torch.tensor([[-math.log(total)]], dtype=torch.double)
    assert float(expected_entropy(members, energy)) == pytest.approx(integral, rel=1e-5)


def test_large_concentrations_have_the_entropy_of_the_mean():
    members = torch.tensor([[[0.2, 0.3, 0.5]]])
    found = expected_entropy(members, torch.tensor([[-200.0]]))
    assert float(found) == pytest.approx(float(stats.entropy([0.2, 0.3, 0.5])), abs=20 / MAX_TOTAL)


def test_shuffled_features_keep_their_values():
    x = torch.arange(60).reshape(10, 2, 3)
    shuffled = shuffle_features(x, seed=1)
    assert torch.equal(shuffled.sort(0).values, x.sort(0).values)
    assert not torch.equal(shuffled, x)
    # Rows are torn apart: no row of the result is a row of the inputs.
    assert not any((row == x.flatten(1)).all(1).any() for row in shuffled.flatten(1))
    assert torch.equal(shuffled, shuffle_features(x, seed=1))
