"""Algorithms with personal models, written again in NumPy and compared on both engines.

Three modes, two strata, four of nine clients per round, clients of unlike size, a decaying rate and
idle modes. Only the plans and the initial weights are the library's.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fedensemble import DivergedError, FedAvg, FederatedData, Federation, InputError, Stratified
from fedensemble.algorithms import Ditto, Local
from fedensemble.testing.toy_problems import labels, numbers, train

SIZES = (7, 3, 5, 1, 9, 4, 6, 2, 8)
K, STEPS, ROUNDS, SEED, INPUTS, CLASSES = 3, 3, 12, 3, 4, 3
RATE = {"lr": 0.4, "lr_decay": 0.7, "lr_decay_every": 3}
CLOSE = 1e-10  # float64
ENGINES = pytest.mark.parametrize("engine", ["loop", "vector"])


def federation(algorithm, engine="vector", modes=K, **options):
    """Every batch is all that a client has, so that gradients need no order of examples."""
    data = FederatedData.from_arrays(numbers(sum(SIZES), INPUTS), labels(sum(SIZES)), list(SIZES))
    options = {"model": lambda: nn.Linear(INPUTS, CLASSES, bias=False), **options}
    return Federation(
        data=data,
        algorithm=algorithm,
        schedule=Stratified(modes=modes, strata=2 if modes > 1 else 1, clients_per_round=4),
        engine=engine,
        **{"steps": STEPS, "batch_size": max(SIZES), "dtype": torch.float64, "seed": SEED}
        | options,
    )


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gradient(made, client, w):
    x, y = (part.numpy() for part in made.data.client(client))
    return (softmax(x @ w.T) - np.eye(CLASSES)[y]).T @ x / len(x)


def rounds(made):
    """The round, its learning rate, and the clients of each mode that has some."""
    for round in range(ROUNDS):
        plan = made.schedule.plan(made.state.schedule, round)
        lr = RATE["lr"] * RATE["lr_decay"] ** (round // RATE["lr_decay_every"])
        clients = {k: plan.client[plan.mode == k].tolist() for k in sorted(set(plan.mode.tolist()))}
        yield round, lr, clients


def start_of(made):
    return made.state.modes["theta"].numpy().reshape(-1, CLASSES, INPUTS).copy()


def ditto(made, lam):
    """The modes and all personal models after the last round."""
    models, personal = start_of(made), {}
    for _, lr, clients in rounds(made):
        for k, chosen in clients.items():
            ends, start = [], models[k].copy()
            for i in chosen:
                w, v = start, personal.get((i, k), start)
                for _ in range(STEPS):
                    v = v - lr * (gradient(made, i, v) + lam * (v - start))
                    w = w - lr * gradient(made, i, w)
                personal[i, k] = v
                ends.append(w)
            models[k] = np.average(ends, axis=0, weights=[SIZES[i] for i in chosen])
    own = [[personal.get((i, k), models[k]) for k in range(K)] for i in range(len(SIZES))]
    return models.reshape(K, -1), np.array(own).reshape(len(SIZES), K, -1)


@ENGINES
def test_ditto(engine):
    made = federation(Ditto(lam=0.7, **RATE), engine)
    models, personal = ditto(made, lam=0.7)
    train(made, ROUNDS)
    np.testing.assert_allclose(made.state.modes["theta"], models, rtol=0, atol=CLOSE)
    own = made.personal_models(range(len(SIZES))).theta
    np.testing.assert_allclose(own, personal, rtol=0, atol=CLOSE)
    assert np.abs(personal - models).max() > 0.1


@ENGINES
def test_the_modes_of_ditto_are_those_of_fedavg_and_cost_as_much(engine):
    def make(algorithm):
        return federation(algorithm, engine, model=with_batch_norm, batch_size=3)

    ditto, fedavg = make(Ditto(lr=0.1)), make(FedAvg(lr=0.1))
    for mine, theirs in zip(ditto.rounds(4), fedavg.rounds(4), strict=True):
        assert (mine.bytes_up, mine.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        assert torch.equal(mine.losses, theirs.losses)
    assert torch.equal(ditto.state.modes["theta"], fedavg.state.modes["theta"])
    assert torch.equal(ditto.state.buffers, fedavg.state.buffers)


def test_without_pull_a_personal_model_is_trained_alone():
    """Its running statistics, too: one client that takes part in every round is one local run."""
    alone = FederatedData.from_arrays(numbers(9, INPUTS), labels(9), [9])

    def make(algorithm):
        return Federation(with_batch_norm, alone, algorithm, modes=1, batch_size=4, seed=SEED)

    made, local = train(make(Ditto(lr=0.2, lam=0.0)), 5), train(make(FedAvg(lr=0.2)), 5)
    theta, buffers = made.personal_models([0])
    torch.testing.assert_close(theta[0], local.state.modes["theta"])
    torch.testing.assert_close(buffers[0], local.state.buffers)


def test_statistics_of_a_client_that_was_never_there_are_those_of_the_mode():
    made = train(federation(Ditto(lr=0.1), model=with_batch_norm, batch_size=3), 4)
    visits = {tuple(pair) for pair in made.engine.client_state_tensors()["visits"].tolist()}
    theta, buffers = made.personal_models(list(range(len(SIZES))))
    for i in range(len(SIZES)):
        for k in range(K):
            same = torch.equal(buffers[i, k], made.state.buffers[k])
            assert same == ((i, k) not in visits) == torch.equal(theta[i, k], mode(made, k))


def test_personal_models_of_fedavg_are_the_modes():
    made = train(federation(FedAvg()), 1)
    theta, buffers = made.personal_models(torch.tensor([4, 1]))
    assert torch.equal(theta, made.state.modes["theta"].expand(2, -1, -1))
    assert buffers.shape == (2, K, 0)


def test_a_personal_model_that_diverges_ends_the_run():
    with pytest.raises(DivergedError, match="loss became nan at round"):
        train(federation(Ditto(lr=0.4, lam=1e30)), ROUNDS)


def test_errors():
    with pytest.raises(InputError, match="lam >= 0; got -1"):
        Ditto(lam=-1)
    for clients, text in (([9], "clients below 9"), ([], "list of client"), (3, "list of client")):
        with pytest.raises(InputError, match=text):
            federation(Ditto()).personal_models(clients)


def with_batch_norm():
    return nn.Sequential(nn.Linear(INPUTS, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, CLASSES))


def mode(made, k):
    return made.state.modes["theta"][k]


@ENGINES
def test_local_training_sends_nothing_and_is_training_alone(engine):
    """Each client against a federation of this client alone, at the rounds that select it."""
    made = federation(Local(**RATE), engine, modes=1)
    start = start_of(made)
    personal = {}
    for _, lr, clients in rounds(made):
        for i in clients[0]:
            v = personal.get(i, start[0])
            for _ in range(STEPS):
                v = v - lr * gradient(made, i, v)
            personal[i] = v
    reports = list(made.rounds(ROUNDS))
    assert {report.bytes_up + report.bytes_down for report in reports} == {0}
    np.testing.assert_array_equal(made.state.modes["theta"].numpy(), start.reshape(1, -1))
    own = made.personal_models(range(len(SIZES))).theta
    for i in range(len(SIZES)):
        expected = personal.get(i, start[0]).ravel()
        np.testing.assert_allclose(own[i, 0], expected, rtol=0, atol=CLOSE)
