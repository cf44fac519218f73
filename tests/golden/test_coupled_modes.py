"""FedCross and FedSDD, whose modes interact, written again in NumPy and compared on both engines.

Three modes, two strata, four of nine clients per round, clients of unlike size, a decaying rate and
idle modes. Only the plans, the initial weights and the order of the server's inputs are the
library's.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedensemble import Balanced, FedAvg, FederatedData, Federation, Stratified, prng
from fedensemble.algorithms import FedCross, FedSDD
from fedensemble.core.types import Cohort, Outcome, Plan
from fedensemble.core.visits.visit_keys import shared_uniform
from fedensemble.testing.toy_problems import labels, numbers, train

SIZES = (7, 3, 5, 1, 9, 4, 6, 2, 8)
K, STEPS, ROUNDS, SEED, INPUTS, CLASSES, SERVER = 3, 3, 12, 3, 4, 3, 11
RATE = {"lr": 0.4, "lr_decay": 0.7, "lr_decay_every": 3}
CLOSE = 1e-10  # float64
ENGINES = pytest.mark.parametrize("engine", ["loop", "vector"])


def federation(
    algorithm, engine="vector", modes=K, strata=2, per_round=4, kind=Stratified, **options
):
    """Every batch is all that a client has, so that gradients need no order of examples."""
    data = FederatedData.from_arrays(
        numbers(sum(SIZES), INPUTS),
        labels(sum(SIZES)),
        list(SIZES),
        x_server=numbers(SERVER, INPUTS, word=4),
    )
    options = {"model": lambda: nn.Linear(INPUTS, CLASSES, bias=False), **options}
    return Federation(
        data=data,
        algorithm=algorithm,
        schedule=kind(modes=modes, strata=strata, clients_per_round=per_round),
        engine=engine,
        steps=STEPS,
        batch_size=max(SIZES),
        dtype=torch.float64,
        seed=SEED,
        **options,
    )


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def means_of_rounds(made, models):
    """Yields the round, the modes that had clients, and sets their rows of `models` [K, C, D]."""
    for round in range(ROUNDS):
        plan = made.schedule.plan(made.state.schedule, round)
        lr = RATE["lr"] * RATE["lr_decay"] ** (round // RATE["lr_decay_every"])
        trained, new = set(plan.mode.tolist()), models.copy()
        for mode in trained:
            clients = plan.client[plan.mode == mode].tolist()
            ends = []
            for client in clients:
                x, y = (part.numpy() for part in made.data.client(client))
                w = models[mode]
                for _ in range(STEPS):
                    w = w - lr * (softmax(x @ w.T) - np.eye(CLASSES)[y]).T @ x / len(x)
                ends.append(w)
            new[mode] = np.average(ends, axis=0, weights=[SIZES[client] for client in clients])
        models[:] = new
        yield round, trained


def fedcross(made, alpha, partner):
    """The models after each round."""
    models, path, idle = start_of(made), [], 0
    for round, trained in means_of_rounds(made, models):
        v, w = models.reshape(K, -1), np.empty((K, INPUTS * CLASSES))
        for i in range(K):
            others = [j for j in range(K) if j != i]
            cosine = {j: v[i] @ v[j] / np.sqrt((v[i] @ v[i]) * (v[j] @ v[j])) for j in others}
            co = {
                "in-order": (i + round % (K - 1) + 1) % K,
                "lowest": min(others, key=cosine.get),
                "highest": max(others, key=cosine.get),
            }[partner]
            w[i] = alpha * v[i] + (1 - alpha) * v[co]
        models[:] = w.reshape(models.shape)
        path.append(w)
        idle += K - len(trained)
    assert idle >= ROUNDS
    return path


def start_of(made):
    return made.state.modes["theta"].numpy().reshape(K, CLASSES, INPUTS).copy()


@ENGINES
@pytest.mark.parametrize("same_start", [True, False])
@pytest.mark.parametrize("partner", ["in-order", "lowest", "highest"])
def test_fedcross(partner, same_start, engine):
    method = FedCross(alpha=0.8, partner=partner, same_start=same_start, **RATE)
    made = federation(method, engine)
    assert bool((made.state.modes["theta"] == made.state.modes["theta"][0]).all()) == same_start
    for expected, report in zip(fedcross(made, 0.8, partner), made.rounds(ROUNDS), strict=True):
        np.testing.assert_allclose(
            made.state.modes["theta"], expected, rtol=0, atol=CLOSE, err_msg=f"{report.round}"
        )
    x = numbers(8, INPUTS, word=9)
    mean = softmax(x.numpy() @ expected.mean(0).reshape(CLASSES, INPUTS).T)
    np.testing.assert_allclose(made.ensemble.predict(x).mean, mean, rtol=0, atol=CLOSE)


def fedsdd(made, history, epochs, batch, lr, temperature):
    """The models after each round, and how often a mode without clients so far did not teach."""
    models, past, path, silent = start_of(made), [[] for _ in range(K)], [], 0
    x = made.data.x_server.numpy()
    for round, trained in means_of_rounds(made, models):
        teachers = []
        for k in range(K):
            if k in trained:
                teachers += [models[k], *past[k][: history - 1]]
            elif past[k]:
                teachers += [models[k], *past[k][1 : history - 1]]  # past[k][0] is the model itself
            else:
                silent += 1
        said = softmax(np.mean([x @ w.T for w in teachers], 0) / temperature)
        if len(teachers) > 1 or 0 not in trained:
            draw = shared_uniform(SEED, round, torch.tensor([0])).flatten()
            key, velocity = prng.fold_in((draw * 2.0**53).long(), 1), 0.0
            for epoch in range(epochs):
                order = prng.permutation(prng.fold_in(key, epoch), SERVER)[0].numpy()
                for rows in (order[at : at + batch] for at in range(0, SERVER, batch)):
                    error = softmax(x[rows] @ models[0].T / temperature) - said[rows]
                    velocity = 0.9 * velocity + temperature * error.T @ x[rows] / len(rows)
                    models[0] = models[0] - lr * velocity
        for k in trained:
            past[k].insert(0, models[k].copy())
        path.append(models.reshape(K, -1).copy())
    return path, silent


@ENGINES
@pytest.mark.parametrize("history", [1, 2, 4])
def test_fedsdd(history, engine):
    settings = {"epochs": 3, "batch": 4, "lr": 0.2, "temperature": 2.5}
    options = {f"server_{name}": settings[name] for name in ("epochs", "batch", "lr")}
    made = federation(FedSDD(history=history, temperature=2.5, **options, **RATE), engine)
    path, silent = fedsdd(made, history, **settings)
    assert silent > 0
    for expected, report in zip(path, made.rounds(ROUNDS), strict=True):
        np.testing.assert_allclose(
            made.state.modes["theta"], expected, rtol=0, atol=CLOSE, err_msg=f"{report.round}"
        )
    x = numbers(8, INPUTS, word=9)
    main = softmax(x.numpy() @ expected[0].reshape(CLASSES, INPUTS).T)
    np.testing.assert_allclose(made.ensemble.predict(x).mean, main, rtol=0, atol=CLOSE)


def test_fedsdd_leaves_the_other_models_as_fedavg_has_them():
    """Distillation writes to the main model only."""
    run, plain = (
        train(federation(method(**RATE)), ROUNDS).state.modes["theta"]
        for method in (FedSDD, FedAvg)
    )
    assert torch.equal(run[1:], plain[1:])
    assert float((run[0] - plain[0]).abs().max()) > 1e-3


def test_fedsdd_with_one_mode_and_no_history_is_fedavg():
    run, plain = (
        train(federation(method, modes=1, strata=1), 4).state.modes["theta"]
        for method in (FedSDD(history=1, **RATE), FedAvg(**RATE))
    )
    assert torch.equal(run, plain)


def test_fedcross_that_never_mixes_is_fed_ensemble():
    method = FedCross(alpha=1.0, same_start=False, deploy="ensemble", **RATE)
    run, plain = (train(federation(one), ROUNDS) for one in (method, FedAvg(**RATE)))
    assert torch.equal(run.state.modes["theta"], plain.state.modes["theta"])
    x = numbers(8, INPUTS, word=9)
    assert torch.equal(run.ensemble.predict(x).members, plain.ensemble.predict(x).members)


def test_two_models_mixed_half_and_half_are_fedavg():
    """Two modes with four of eight clients each and equal weights: both are FedAvg's model."""
    options = {"strata": 2, "per_round": 8, "kind": Balanced}
    method = FedCross(alpha=0.5, weighting="uniform", **RATE)
    run = federation(method, modes=2, **options)
    plain = federation(FedAvg(weighting="uniform", **RATE), modes=1, **{**options, "strata": 1})
    # FedAvg's clients of a round are those of the run with two modes.
    plain.outcome = lambda: everybody_in_mode_zero(run, plain.round)
    for _ in range(4):
        train(plain, 1)
        train(run, 1)
        both = plain.state.modes["theta"].expand(2, -1)
        torch.testing.assert_close(run.state.modes["theta"], both, rtol=0, atol=CLOSE)


def everybody_in_mode_zero(run, round):
    plan = run.schedule.plan(run.state.schedule, round)
    assert torch.bincount(plan.mode).tolist() == [4, 4]
    return Outcome(Plan(plan.client, torch.zeros_like(plan.mode)), {})


def test_mixing_in_order_keeps_the_mean_of_the_models():
    theta, none = numbers(5, 7), torch.empty(5, 0).double()
    for round in range(9):
        mixed, _ = FedCross(alpha=0.7).couple({"theta": theta}, none, cohort_of(5, round))
        torch.testing.assert_close(mixed["theta"].mean(0), theta.mean(0), rtol=0, atol=1e-14)
        theta = mixed["theta"]


def test_every_mode_meets_all_others_in_order():
    method, theta = FedCross(), numbers(5, 7)
    met = torch.stack([method.partners(theta, round) for round in range(4)])
    for mode in range(5):
        assert sorted(met[:, mode].tolist()) == [j for j in range(5) if j != mode]
    assert torch.equal(method.partners(theta, 4), met[0])


@pytest.mark.parametrize("partner", ["lowest", "highest"])
def test_partners_by_similarity_do_not_depend_on_the_order_of_the_modes(partner):
    theta, order = numbers(6, 9), torch.tensor([3, 1, 5, 0, 2, 4])
    none, method = torch.empty(6, 0).double(), FedCross(partner=partner, alpha=0.6)
    first, second = (
        method.couple({"theta": rows}, none, cohort_of(6))[0]["theta"]
        for rows in (theta, theta[order])
    )
    torch.testing.assert_close(second, first[order], rtol=0, atol=1e-14)


def test_the_order_of_the_other_modes_does_not_matter_to_fedsdd():
    method = federation(FedSDD(history=3), modes=5).algorithm
    state = method.init_mode(numbers(5, INPUTS * CLASSES))
    state |= {"seen": torch.tensor([[2.0], [3.0], [0.0], [1.0], [3.0]]).double()}
    state["past"] = numbers(*state["past"].shape, word=5)
    cohort, none = cohort_of(5, count=(1, 0, 0, 2, 1)), torch.empty(5, 0).double()
    order = torch.tensor([0, 3, 1, 4, 2])
    first, _ = method.couple(state, none, cohort)
    count = cohort.count[order]
    moved = Cohort(count, count, count, 9, cohort.shared_draw)
    second, _ = method.couple({n: value[order] for n, value in state.items()}, none, moved)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value[order], rtol=0, atol=1e-13)


def cohort_of(modes, round=0, count=None):
    counts = torch.tensor(count or [1] * modes).double().unsqueeze(1)
    draw = torch.full((modes, 1), 0.37).double()
    return Cohort(counts, counts, counts / 9, 9, draw, round=round)


def normed():
    return nn.Sequential(nn.Linear(INPUTS, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))


def test_fedsdd_evaluates_each_model_with_its_own_statistics():
    """One step against plain modules: current and past models with unlike running statistics."""
    settings = {"server_epochs": 2, "server_batch": 4, "server_lr": 0.3, "temperature": 2.0}
    made = federation(FedSDD(history=2, **settings), model=normed)
    method, x = made.algorithm, made.data.x_server
    state = method.init_mode(made.state.modes["theta"])
    state["past"] = state["past"] + 0.3 * numbers(*state["past"].shape, word=5)
    state["past_buffers"] = 0.5 + numbers(*state["past_buffers"].shape, word=6).abs()
    state["seen"] = torch.tensor([[2.0], [1.0], [0.0]]).double()
    buffers = 0.5 + numbers(*made.state.buffers.shape, word=7).abs()
    cohort = cohort_of(K, count=(2, 0, 1))
    got, after = method.couple(state, buffers, cohort)
    assert torch.equal(after, buffers)

    model = normed().double().eval()

    def load(theta, statistics):
        vector_to_parameters(theta.clone(), model.parameters())
        named = made.model.buffer_layout.unflatten(statistics)
        model.load_state_dict({**model.state_dict(), **named})
        return model(x).detach()

    # mode 1 had no clients, so that what is stored of it is its current model; mode 2 stores none
    teachers = [
        *((state["theta"][k], buffers[k]) for k in range(K)),
        (state["past"][0], state["past_buffers"][0]),
    ]
    said = F.softmax(torch.stack([load(*teacher) for teacher in teachers]).mean(0) / 2, -1)
    load(state["theta"][0], buffers[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(2):
        order = prng.permutation(prng.fold_in(cohort.key(1)[:1], epoch), len(x))[0]
        for rows in order.split(4):
            optimizer.zero_grad()
            (4 * F.cross_entropy(model(x[rows]) / 2, said[rows])).backward()
            optimizer.step()
    main = parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(got["theta"][0], main, rtol=0, atol=CLOSE)
    assert torch.equal(got["theta"][1:], state["theta"][1:])
    assert torch.equal(got["past"][[0, 2]], got["theta"][[0, 2]])  # now stored
    assert torch.equal(got["past_buffers"][[0, 2]], buffers[[0, 2]])
    assert torch.equal(got["past"][1], state["past"][1])
    assert got["seen"].flatten().tolist() == [2, 1, 1]


def test_fedcross_mixes_and_deploys_running_statistics_too():
    made = train(federation(FedCross(alpha=0.6), model=normed), 3)
    state = made.state
    mixed, buffers = made.algorithm.couple(state.modes, state.buffers, cohort_of(K, round=1))
    for got, value in ((mixed["theta"], state.modes["theta"]), (buffers, state.buffers)):
        expected = 0.6 * value + 0.4 * value[[2, 0, 1]]  # round 1: the mode after the next one
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)
    module = made.ensemble.module(0).double()
    x = numbers(8, INPUTS, word=9)
    vector_to_parameters(state.modes["theta"].mean(0), (deployed := normed().double()).parameters())
    named = made.model.buffer_layout.unflatten(state.buffers.mean(0))
    deployed.load_state_dict({**deployed.state_dict(), **named})
    torch.testing.assert_close(module(x), deployed.eval()(x), rtol=0, atol=1e-12)


def test_regression_distils_the_mean_output():
    """Of linear models the mean output is the output of the mean weights, to which SGD goes."""
    clients = [(numbers(5, 2, word=i), numbers(5, 1, word=9 + i)) for i in range(4)]
    data = FederatedData.from_clients(clients, x_server=numbers(12, 2, word=20))
    options = {
        "loss": "mse",
        "modes": 2,
        "strata": 2,
        "schedule": "balanced",
        "dtype": torch.float64,
    }
    distilled, plain = (
        train(Federation(lambda: nn.Linear(2, 1), data, method, **options), 1).state.modes["theta"]
        for method in (
            FedSDD(lr=0.05, history=1, server_lr=0.05, server_epochs=300),
            FedAvg(lr=0.05),
        )
    )
    assert float((plain[0] - plain[1]).abs().max()) > 0.1
    torch.testing.assert_close(distilled[0], plain.mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", [FedCross, FedSDD])
def test_bytes_are_those_of_fedavg(method):
    run, plain = (
        [(r.bytes_up, r.bytes_down) for r in federation(one(**RATE)).rounds(4)]
        for one in (method, FedAvg)
    )
    assert run == plain


@pytest.mark.parametrize("method", [FedCross, FedSDD])
def test_one_model_is_deployed_unless_the_ensemble_is(method):
    x = numbers(8, INPUTS, word=9)
    one = train(federation(method(**RATE)), 2).ensemble
    assert (len(one), one.prediction_models, len(one.predict(x).members)) == (1, 1, 1)
    assert one.prediction_bytes == 8 * INPUTS * CLASSES
    several = train(federation(method(deploy="ensemble", **RATE)), 2).ensemble
    assert (len(several), several.prediction_models, len(several.predict(x).members)) == (K, K, K)
