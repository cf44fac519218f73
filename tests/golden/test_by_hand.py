"""The loop engine against FedAvg written by hand with plain torch, and aggregation against hand
arithmetic.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import FedAvg, FederatedData, Federation, prng
from fedensemble.core.mode_means import ModeMeans
from fedensemble.core.visits.batches import batch_table
from fedensemble.testing.toy_problems import classification, labels, numbers, ragged

# Same formulas in the same order; autograd may add up a weight's gradient in another order than
# torch.func does.
SAME_ARITHMETIC = 1e-14


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def hand_written(federation, data, lr, rounds):
    """FedAvg in twenty lines: plain modules, autograd and state dicts; only the batches are the
    library's.
    """
    server, client_model = (federation.model.build(0) for _ in range(2))
    theta = federation.model.theta_layout.unflatten(federation.state.modes["theta"][0])
    server.load_state_dict(theta)
    for round in range(rounds):
        clients = federation.schedule.plan(federation.state.schedule, round).client.tolist()
        sums, total = {name: torch.zeros_like(value) for name, value in theta.items()}, 0
        for client in clients:
            client_model.load_state_dict(server.state_dict())
            x, y = data.client(client)
            key = prng.key(
                federation.seed, "batches", round, torch.tensor([client]), torch.tensor([0])
            )
            rows, weights = batch_table(key, data.size[client : client + 1], federation.work)
            for batch, weight in zip(rows[:, 0], weights[:, 0], strict=True):
                batch = batch[weight.bool()]  # noqa: PLW2901
                loss = F.cross_entropy(client_model(x[batch]), y[batch])
                gradients = torch.autograd.grad(loss, list(client_model.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(
                        client_model.parameters(), gradients, strict=True
                    ):
                        parameter.sub_(lr * gradient)
            for name, value in client_model.state_dict().items():
                sums[name] += len(y) * value
            total += len(y)
        server.load_state_dict({name: value / total for name, value in sums.items()})
    return federation.model.theta_layout.flatten(server.state_dict())


@pytest.mark.parametrize(("epochs", "batch_size", "clients"), [(1, 32, 6), (2, 3, 4), (3, 1, 1)])
def test_fedavg(epochs, batch_size, clients):
    data = classification()
    federation = Federation(
        network,
        data,
        FedAvg(lr=0.2),
        modes=1,
        strata=1,
        clients_per_round=clients,
        epochs=epochs,
        batch_size=batch_size,
        engine="loop",
        dtype=torch.float64,
        seed=11,
    )
    expected = hand_written(federation, data, 0.2, rounds=4)
    for _ in federation.rounds(4):
        pass
    torch.testing.assert_close(
        federation.state.modes["theta"][0], expected, rtol=0, atol=SAME_ARITHMETIC
    )


def test_reported_loss_is_the_mean_over_steps():
    data = FederatedData.from_clients([(numbers(5, 4), labels(5))])
    federation = Federation(
        network, data, FedAvg(lr=1e-12), modes=1, batch_size=2, dtype=torch.float64
    )
    model = federation.model.build(0)
    model.load_state_dict(
        federation.model.theta_layout.unflatten(federation.state.modes["theta"][0])
    )
    key = prng.key(0, "batches", 0, torch.tensor([0]), torch.tensor([0]))
    rows, weights = batch_table(key, data.size, federation.work)
    steps = [rows[s, 0][weights[s, 0]] for s in range(3)]
    expected = sum(F.cross_entropy(model(data.x[step]), data.y[step]).item() for step in steps) / 3
    # the rate is nearly zero, not zero
    assert next(federation.rounds(1)).loss == pytest.approx(expected, abs=1e-10)


def test_aggregation_weights():
    means = ModeMeans(modes=3)
    means.add(
        torch.tensor([0, 2]),
        torch.tensor([1.0, 5.0]),
        {"theta": torch.tensor([[2.0, 4.0], [7.0, 7.0]])},
    )
    means.add(torch.tensor([0]), torch.tensor([3.0]), {"theta": torch.tensor([[6.0, 0.0]])})
    # (1*2 + 3*6)/4, (1*4 + 3*0)/4
    assert means.mean()["theta"].tolist() == [[5.0, 1.0], [0.0, 0.0], [7.0, 7.0]]
    cohort = means.cohort(population=9, total=16, shared_draw=torch.zeros(3, 1))
    assert cohort.count.flatten().tolist() == [2, 0, 1]
    assert cohort.weight.flatten().tolist() == [4, 0, 5]
    assert cohort.share.flatten().tolist() == [4 / 16, 0, 5 / 16]
    assert cohort.population == 9


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize(("weighting", "expected"), [("examples", 0.75), ("uniform", 0.5)])
def test_weighting(engine, weighting, expected):
    """From w = 0, one step on (w - y)^2 at rate 1/2 lands on y; y is 0 (one example) or 1 (three
    examples).
    """
    data = FederatedData.from_clients([([[1.0]], [[0.0]]), ([[1.0]] * 3, [[1.0]] * 3)])

    def model():
        layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    algorithm = FedAvg(lr=0.5, weighting=weighting)
    federation = Federation(
        model, data, algorithm, modes=1, loss="mse", engine=engine, dtype=torch.float64
    )
    next(federation.rounds(1))
    assert federation.state.modes["theta"].item() == expected


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_batch_norm_running_statistics(engine):
    """r <- (1 - 0.1) r + 0.1 m for each local batch, then the mean over clients by examples."""
    sizes = [4, 6]
    data = ragged(numbers(10, 2), labels(10, classes=2), sizes)
    federation = Federation(
        lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)),
        data,
        FedAvg(lr=0.1),
        modes=1,
        batch_size=2,
        engine=engine,
        dtype=torch.float64,
        seed=3,
    )
    next(federation.rounds(1))
    expected = {"0.running_mean": torch.zeros(2).double(), "0.running_var": torch.zeros(2).double()}
    for client, size in enumerate(sizes):
        x, _ = data.client(client)
        key = prng.key(3, "batches", 0, torch.tensor([client]), torch.tensor([0]))
        rows, _ = batch_table(key, data.size[client : client + 1], federation.work)
        mean, variance = torch.zeros(2).double(), torch.ones(2).double()
        for batch in rows[:, 0]:  # inputs of the first layer: they do not depend on the weights
            mean = 0.9 * mean + 0.1 * x[batch].mean(0)
            variance = 0.9 * variance + 0.1 * x[batch].var(0)
        expected["0.running_mean"] += size / 10 * mean
        expected["0.running_var"] += size / 10 * variance
    got = federation.model.buffer_layout.unflatten(federation.state.buffers[0])
    torch.testing.assert_close(got, expected, rtol=0, atol=SAME_ARITHMETIC)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_frozen_parameters_stay_bit_for_bit_in_float32(engine):
    def model():
        made = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 3))
        made[0].requires_grad_(False)
        return made

    federation = Federation(
        model, classification(), FedAvg(lr=0.1), modes=2, strata=2, engine=engine
    )
    start = federation.state.buffers.clone()
    for _ in federation.rounds(6):
        pass
    assert start.shape == (2, 250)
    assert torch.equal(federation.state.buffers, start)
