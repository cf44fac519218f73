"""FedBE: its distribution, its teacher and its student against plain formulas, and zero variance,
which is FedAvg.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import vector_to_parameters

from fedensemble import FederatedData, Federation, InputError, prng
from fedensemble.algorithms import FedAvg, FedBE, FedBENoKD
from fedensemble.algorithms.distilled.posterior import sample_dirichlet, sample_gaussian
from fedensemble.core.types import Cohort, GatheredUploads
from fedensemble.testing import check_algorithm
from fedensemble.testing.toy_problems import (
    CLASSES,
    FEATURES,
    classification,
    labels,
    numbers,
    small_federation,
    small_model,
    train,
)

CLOSE = 1e-10  # float64
SIGMAS = 5.0  # of a mean over many samples


def three_clients(modes=(0, 1, 1), size=4):
    theta = numbers(3, size, word=7)
    weight = torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64)
    members = GatheredUploads(
        torch.arange(3), torch.tensor(modes), weight, {"theta": theta}, torch.empty(3, 0).double()
    )
    return members, members.shares(2) @ theta


def test_gaussian_has_the_clients_mean_and_variance():
    members, mean = three_clients()
    key = torch.as_tensor(prng.key(0, "test", torch.arange(2)))
    drawn = sample_gaussian(mean, members, key, samples=4000, scale=1.0)
    assert torch.equal(drawn[0], mean[:1].expand(4000, -1))  # one client: no variance
    theta = members.uploads["theta"][1:]
    shares = torch.tensor([[0.25], [0.75]])
    variance = (shares * (theta - mean[1]) ** 2).sum(0)
    assert bool(((drawn[1].mean(0) - mean[1]).abs() < SIGMAS * torch.sqrt(variance / 4000)).all())
    assert bool(((drawn[1].var(0) / variance - 1).abs() < SIGMAS * math.sqrt(2 / 4000)).all())
    half = sample_gaussian(mean, members, key, samples=3, scale=0.5)
    torch.testing.assert_close(
        half - mean.unsqueeze(1), 0.5 * (drawn[:, :3] - mean.unsqueeze(1)), rtol=0, atol=CLOSE
    )


def test_dirichlet_weights_have_their_moments():
    size, alpha, count = 2, 0.7, 6000
    members = GatheredUploads(
        torch.tensor([4, 9]),
        torch.zeros(2, dtype=torch.int64),
        torch.ones(2).double(),
        {"theta": torch.eye(size).double()},
        torch.empty(2, 0).double(),
    )
    key = torch.as_tensor(prng.key(0, "test", torch.arange(1)))
    drawn = sample_dirichlet(
        members.shares(1) @ members.uploads["theta"], members, key, count, alpha
    )[0]
    torch.testing.assert_close(drawn.sum(1), torch.ones(count).double(), rtol=0, atol=CLOSE)
    variance = 1 / (4 * (2 * alpha + 1))  # of Beta(alpha, alpha), which the first weight is
    assert abs(float(drawn[:, 0].mean()) - 0.5) < SIGMAS * math.sqrt(variance / count)
    assert abs(float(drawn[:, 0].var()) / variance - 1) < SIGMAS * math.sqrt(2 / count)
    tiny = sample_dirichlet(members.shares(1) @ members.uploads["theta"], members, key, 50, 1e-3)[0]
    assert bool(tiny.isfinite().all())


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
@pytest.mark.parametrize("kind", [FedBE, FedBENoKD])
def test_zero_variance_is_fedavg(kind, distribution):
    """All clients have the same data in whole batches, so their models are equal."""
    x, y = numbers(6, FEATURES), labels(6)
    data = FederatedData.from_clients([(x, y)] * 4, x_server=numbers(5, FEATURES, word=1))
    settings = {"modes": 2, "strata": 2, "batch_size": 6, "epochs": 3, "dtype": torch.float64}
    method = kind(lr=0.3, distribution=distribution)
    run, plain = (
        train(Federation(small_model, data, m, **settings), 4) for m in (method, FedAvg(lr=0.3))
    )
    torch.testing.assert_close(
        run.state.modes["theta"], plain.state.modes["theta"], rtol=0, atol=CLOSE
    )
    x_new = numbers(9, FEATURES, word=2)
    torch.testing.assert_close(
        run.ensemble.predict(x_new).mean, plain.ensemble.predict(x_new).mean, rtol=0, atol=CLOSE
    )


def test_server_step_by_hand():
    """One mode, three clients, one nn.Module after another and torch.optim.SGD, against the batched
    server.
    """
    method = FedBE(
        samples=2,
        server_epochs=4,
        server_batch=3,
        cycle=3,
        server_lr=0.3,
        server_lr_low=0.1,
        temperature=0.5,
    )
    federation = small_federation(method, "loop", modes=1, strata=1)
    size, x = federation.model.theta_layout.total, federation.data.x_server
    theta, weight = 0.5 * numbers(3, size), torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    members = GatheredUploads(
        torch.arange(3), torch.zeros(3, dtype=torch.int64), weight, {"theta": theta}, theta[:, :0]
    )
    mean = (weight / 8) @ theta
    one, shared_draw = torch.ones(1, 1).double(), torch.full((1, 1), 0.37).double()
    cohort = Cohort(one, one, one, 9, shared_draw, members)
    got = federation.algorithm.server_update({"theta": mean[None]}, {"theta": mean[None]}, cohort)[
        "theta"
    ][0]

    spread = torch.sqrt((weight / 8) @ (theta - mean) ** 2)
    samples = [
        mean + spread * prng.normal(prng.fold_in(cohort.key(1), s), size)[0] for s in range(2)
    ]
    model = small_model().double()

    def outputs(vector):
        vector_to_parameters(vector, model.parameters())
        return model(x).detach()

    teacher = (
        torch.stack([F.softmax(outputs(v), -1) for v in (*samples, *theta, mean)]).mean(0) ** 2
    )
    teacher = teacher / teacher.sum(-1, keepdim=True)
    vector_to_parameters(mean.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    ends, step = [], 0
    for epoch in range(4):
        order = prng.permutation(prng.fold_in(cohort.key(2), epoch), len(x))[0]
        for rows in order.split(3):
            optimizer.param_groups[0]["lr"] = (0.3, 0.2, 0.1)[step % 3]
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), teacher[rows]).backward()
            optimizer.step()
            step += 1
            if step % 3 == 0:
                ends.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    assert len(ends) == 4
    torch.testing.assert_close(got, torch.stack(ends).mean(0), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("distribution", ["gaussian", "dirichlet"])
def test_idle_modes_cost_nothing_and_change_nothing(distribution):
    method = FedBE(
        samples=2,
        server_epochs=2,
        server_batch=4,
        server_lr=0.3,
        server_lr_low=0.1,
        distribution=distribution,
    )
    bound = small_federation(method, "loop", modes=4, strata=2).algorithm
    before, theta = (
        0.5 * numbers(4, bound.context.model.theta_layout.total),
        0.5 * numbers(3, 43, word=2),
    )
    members = GatheredUploads(
        torch.arange(3),
        torch.tensor([1, 3, 3]),
        torch.tensor([1.0, 2.0, 5.0]).double(),
        {"theta": theta},
        theta[:, :0],
    )
    mean, count = members.shares(4) @ theta, torch.tensor([[0.0], [1.0], [0.0], [2.0]]).double()
    cohort = Cohort(
        count, count, count, 9, torch.tensor([[0.1], [0.3], [0.5], [0.7]]).double(), members
    )
    trained = []
    gradient = bound.context.gradient
    bound.context.gradient = lambda objective, at, *more: (
        trained.append(len(at)) or gradient(objective, at, *more)
    )
    got = bound.server_update({"theta": before}, {"theta": mean}, cohort)["theta"]
    assert set(trained) == {2}  # models, of four modes
    assert torch.equal(got[[0, 2]], before[[0, 2]])
    # sums run over more models, so only their rounding differs
    all_four = bound._train_students(mean, cohort)
    torch.testing.assert_close(got[[1, 3]], all_four[[1, 3]], rtol=0, atol=1e-13)


def test_mean_over_classes_is_a_smaller_rate():
    """Plain SGD with momentum is linear in the gradient: C times the rate undoes the mean over C
    classes.
    """
    shared = {"samples": 2, "server_epochs": 2, "server_batch": 4}
    total = FedBE(server_lr=0.3, server_lr_low=0.1, **shared)
    mean = FedBE(
        server_lr=0.3 * CLASSES, server_lr_low=0.1 * CLASSES, class_reduction="mean", **shared
    )
    found = [
        train(small_federation(method, "vector", modes=2, strata=2), 3).state.modes["theta"]
        for method in (total, mean)
    ]
    torch.testing.assert_close(*found, rtol=0, atol=CLOSE)
    with pytest.raises(InputError, match="class_reduction 'sum' or 'mean'; got 'max'"):
        FedBE(class_reduction="max")


def test_few_steps_give_the_last_model():
    method = FedBE(samples=1, server_epochs=1, cycle=50, server_lr=0.5, server_lr_low=0.5)
    federation = train(small_federation(method, "vector", modes=1, strata=1), 1)
    plain = train(small_federation(FedAvg(), "vector", modes=1, strata=1), 1)
    assert float((federation.state.modes["theta"] - plain.state.modes["theta"]).abs().max()) > 1e-4


@pytest.mark.parametrize("kind", [FedBE, FedBENoKD])
def test_contract_with_dirichlet(kind):
    options = {"server_epochs": 2} if kind is FedBE else {}
    check_algorithm(kind(distribution="dirichlet", samples=3, **options), "vector")


def test_regression_distils_the_mean_output():
    data = FederatedData.from_clients(
        [(numbers(5, 2, word=i), numbers(5, 1, word=9 + i)) for i in range(3)],
        x_server=numbers(12, 2, word=20),
    )
    method = FedBE(lr=0.05, server_lr=0.05, server_lr_low=0.05, server_epochs=200)

    def model():
        return nn.Linear(2, 1)

    federation = train(Federation(model, data, method, loss="mse", modes=1, dtype=torch.float64), 1)
    plain = train(
        Federation(model, data, FedAvg(lr=0.05), loss="mse", modes=1, dtype=torch.float64), 1
    )
    # Of linear models the mean output is the output of the mean weights, here of samples, clients
    # and their mean.
    distance = float((federation.state.modes["theta"] - plain.state.modes["theta"]).abs().max())
    assert 1e-6 < distance < 0.05


def test_batch_statistics_and_recurrent_layers():
    def normed():
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))

    federation = Federation(
        normed, classification(), FedBE(samples=2, server_epochs=1), modes=2, batch_size=3
    )
    train(federation, 2)
    assert all(bool(value.isfinite().all()) for value in federation.state.modes.values())

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.out = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.out(self.layers(x)[0])

    data = FederatedData.from_arrays(
        numbers(12, 5, 2), labels(12, 5), [7, 5], x_server=numbers(4, 5, 2)
    )
    train(
        Federation(
            Recurrent, data, FedBE(samples=2, server_epochs=1), modes=2, dtype=torch.float64
        ),
        2,
    )


def test_without_distillation_a_mode_predicts_with_its_samples(tmp_path):
    method = FedBENoKD(lr=0.5, samples=3)
    federation = train(small_federation(method, "vector", modes=2, strata=2), 2)
    samples = federation.state.modes["samples"].unflatten(1, (3, -1))
    x = numbers(7, FEATURES, word=5)
    averaged = train(small_federation(FedAvg(lr=0.5), "vector", modes=2, strata=2), 2).state.modes[
        "theta"
    ]
    # clients receive their mean, not that of samples
    assert torch.equal(federation.state.modes["theta"], averaged)
    prediction = federation.ensemble.predict(x)
    expected = torch.stack(
        [
            torch.stack(
                [federation.model.outputs(one, torch.empty(0), x).softmax(-1) for one in mode]
            ).mean(0)
            for mode in samples
        ]
    )
    torch.testing.assert_close(prediction.modes, expected, rtol=0, atol=CLOSE)
    assert prediction.members.shape == (6, 7, CLASSES) and prediction.mode_index.tolist() == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]
    torch.testing.assert_close(prediction.mean, expected.mean(0), rtol=0, atol=CLOSE)
    federation.save(tmp_path)
    again = Federation.load(tmp_path, model=small_model, data=federation.data)
    assert torch.equal(again.ensemble.predict(x).mean, prediction.mean)


def test_no_data_on_the_server_is_said_at_once():
    data = FederatedData.from_arrays(numbers(6, FEATURES), labels(6), [3, 3])
    with pytest.raises(InputError, match=r"x_server.*data.server_share.*data.server_file"):
        Federation(small_model, data, "fedbe", modes=1)
    Federation(small_model, data, "fedbe-nokd", modes=1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FedBE, {"samples": 0}),
        (FedBE, {"scale": -1.0}),
        (FedBE, {"alpha": 0.0}),
        (FedBE, {"temperature": 0.0}),
        (FedBE, {"distribution": "uniform"}),
        (FedBE, {"server_lr": 0.1, "server_lr_low": 0.2}),
        (FedBE, {"cycle": 0}),
        (FedBENoKD, {"samples": 0}),
    ],
    ids=str,
)
def test_wrong_settings_are_named(kind, options):
    with pytest.raises(InputError, match=f"{kind.__name__} needs .*{next(iter(options))}"):
        kind(**options)
