"""SVGD against a NumPy reference with idle modes, and against a posterior in one dimension."""

import numpy as np
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble.algorithms.svgd import SVGD
from fedensemble.errors import InputError

NOISE, ALPHA, SIZES = 0.5, 2.0, (3, 1, 4)


class Line(nn.Linear):
    """A line through the origin, with a start far from the posterior."""

    def __init__(self, features=1):
        super().__init__(features, 1, bias=False)
        nn.init.normal_(self.weight, mean=0.5, std=0.3)


def data(features=1):
    rng = np.random.default_rng(0)
    clients = [rng.normal(size=(size, features)) for size in SIZES]
    return fe.FederatedData.from_clients(
        [(x, 1.5 * x[:, :1] + NOISE * rng.normal(size=(len(x), 1))) for x in clients]
    )


def federation(algorithm, features=1, modes=4, engine="vector", **options):
    return fe.Federation(
        lambda: Line(features),
        data(features),
        algorithm,
        modes=modes,
        loss="mse",
        dtype=torch.float64,
        engine=engine,
        batch_size=max(SIZES),
        **options,
    )


def step_of_numpy(w, plan, data, lr, steps, alpha, repulsion, server_lr):
    """One round from modes [K, P]: an own loop over visits and pairs of modes."""
    uploads, weights = {}, {}
    for client, mode in zip(plan.client.tolist(), plan.mode.tolist(), strict=True):
        x, y = (part.double().numpy() for part in data.client(client))
        v = w[mode].copy()
        for _ in range(steps):
            v = v - lr * (2 * x.T @ (x @ v - y[:, 0]) / len(x) + alpha / sum(SIZES) * v)
        uploads[mode] = uploads.get(mode, 0) + len(x) * v
        weights[mode] = weights.get(mode, 0) + len(x)
    count = len(w)
    distances = [np.sum((w[a] - w[b]) ** 2) for a in range(count) for b in range(a)]
    h = sorted(distances)[(len(distances) - 1) // 2] / np.log(count + 1)
    new = w.copy()
    for k in uploads:
        total = np.zeros_like(w[k])
        for j, total_upload in uploads.items():
            kernel = np.exp(-np.sum((w[j] - w[k]) ** 2) / h)
            gradient = -2 / h * (w[j] - w[k]) * kernel  # by w_j
            total += kernel * (total_upload / weights[j] - w[j])
            total += repulsion * lr * steps / sum(SIZES) * gradient
        new[k] = w[k] + server_lr * total / len(uploads)
    return new


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_rounds_with_idle_modes_are_those_of_numpy(engine):
    method = SVGD(lr=0.05, prior_precision=0.7, repulsion=0.5, server_lr=0.8)
    run = federation(method, features=3, engine=engine, strata=2, clients_per_round=2, steps=2)
    w = run.state.modes["theta"].numpy().copy()
    some_idle = False
    for _ in range(6):
        plan = run.next_request().plan
        some_idle |= len(set(plan.mode.tolist())) < 4
        list(run.rounds(1))
        w = step_of_numpy(w, plan, run.data, 0.05, 2, 0.7, 0.5, 0.8)
        np.testing.assert_allclose(run.state.modes["theta"].numpy(), w, atol=1e-12)
    assert some_idle


def posterior():
    x, y = data().x.double(), data().y.double()
    precision = float((x**2).sum()) / NOISE**2 + ALPHA
    return float((x * y).sum()) / NOISE**2 / precision, precision**-0.5


def particles(repulsion):
    method = SVGD(
        lr=0.1,
        prior_precision=2 * NOISE**2 * ALPHA,
        repulsion=repulsion,
        bandwidth=0.02,
        server_lr=2.0,
    )
    run = federation(method, modes=12, schedule="independent-kfold", clients_per_round=3, steps=1)
    list(run.rounds(250))
    return run.state.modes["theta"].numpy().ravel()


def test_particles_have_the_moments_of_the_posterior_and_collapse_without_repulsion():
    mean, deviation = posterior()
    found = particles(2 * NOISE**2)
    assert found.mean() == pytest.approx(mean, abs=0.1 * deviation)
    assert found.std() == pytest.approx(deviation, rel=0.2)
    assert particles(0.0).std() < 0.1 * deviation


def test_one_mode_is_fedavg_with_the_prior():
    single = {"modes": 1, "clients_per_round": 3, "steps": 2}
    svgd = federation(SVGD(lr=0.1), **single)
    other = federation(fe.algorithms.Anchored(lr=0.1, anchor=False), **single)
    list(svgd.rounds(3)), list(other.rounds(3))
    assert torch.allclose(svgd.state.modes["theta"], other.state.modes["theta"], atol=1e-14)


def test_declares_that_modes_interact_and_checks_options():
    assert SVGD.couples
    for options in ({"repulsion": -1.0}, {"bandwidth": -1.0}, {"server_lr": 0.0}):
        with pytest.raises(InputError, match=next(iter(options))):
            SVGD(**options)
