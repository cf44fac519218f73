"""log p(w | D) against torch's distributions."""

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal

import fedensemble as fe
from fedensemble.errors import InputError
from fedensemble.theory.log_posterior import log_posterior


def federation(classes=None):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 2, generator=random)
    y = (
        torch.randn(3, 4, 1, generator=random)
        if classes is None
        else torch.arange(12).view(3, 4) % 2
    )
    return fe.Federation(
        lambda: nn.Linear(2, classes or 1),
        fe.FederatedData.from_clients(list(zip(x, y, strict=True))),
        fe.FedAvg(),
        modes=2,
        loss="mse" if classes is None else "cross_entropy",
        dtype=torch.float64,
    )


def test_regression():
    run = federation()
    theta, data = run.state.modes["theta"], run.data
    anchors = torch.ones_like(theta)
    found = log_posterior(run.ensemble, data, prior_precision=4.0, noise=0.5, anchors=anchors)
    for mode in range(2):
        output = run.ensemble.module(mode)(data.x.double()).detach()
        expected = Normal(output, 0.5).log_prob(data.y.double()).sum()
        expected = expected + Normal(torch.ones(3).double(), 0.5).log_prob(theta[mode]).sum()
        assert float(found[mode]) == pytest.approx(float(expected))


def test_classification():
    run = federation(classes=2)
    found = log_posterior(run.ensemble, run.data, prior_precision=1.0)
    for mode in range(2):
        logits = run.ensemble.module(mode)(run.data.x.double()).detach()
        expected = Categorical(logits=logits).log_prob(run.data.y).sum()
        theta = run.state.modes["theta"][mode]
        expected = expected + Normal(torch.zeros(6).double(), 1.0).log_prob(theta).sum()
        assert float(found[mode]) == pytest.approx(float(expected))


def test_wrong_arguments():
    with pytest.raises(InputError, match="prior_precision > 0"):
        log_posterior(federation().ensemble, federation().data, prior_precision=0.0)
