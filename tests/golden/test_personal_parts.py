"""Training with personal parts, written again in NumPy and in plain torch, on both engines.

Three modes, two strata, four of nine clients per round, clients of unlike size, a decaying rate and
idle modes. Only the plans and the initial weights are the library's.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble import FedAvg, FederatedData, Federation, InputError, Stratified
from fedensemble.flat_params import payload_bytes
from fedensemble.testing.toy_problems import labels, numbers, train

SIZES = (7, 3, 5, 1, 9, 4, 6, 2, 8)
K, STEPS, ROUNDS, SEED, INPUTS, HIDDEN, CLASSES = 3, 3, 12, 3, 4, 5, 3
RATE = {"lr": 0.4, "lr_decay": 0.7, "lr_decay_every": 3}
CLOSE = 1e-10  # float64
ENGINES = pytest.mark.parametrize("engine", ["loop", "vector"])


def two_layers():
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN, bias=False), nn.Linear(HIDDEN, CLASSES, bias=False)
    )


def with_batch_norm():
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)
    )


def federation(engine="vector", model=two_layers, algorithm=None, sizes=SIZES, **options):
    """Every batch is all that a client has, so that gradients need no order of examples."""
    data = FederatedData.from_arrays(numbers(sum(sizes), INPUTS), labels(sum(sizes)), list(sizes))
    return Federation(
        model,
        data,
        FedAvg(**RATE) if algorithm is None else algorithm,
        schedule=Stratified(modes=K, strata=2, clients_per_round=4),
        engine=engine,
        **{"steps": STEPS, "batch_size": max(sizes), "dtype": torch.float64, "seed": SEED}
        | options,
    )


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gradients(made, client, body, head):
    """Of the mean cross-entropy of x -> head body x."""
    x, y = (part.numpy() for part in made.data.client(client))
    error = (softmax(x @ body.T @ head.T) - np.eye(CLASSES)[y]) / len(x)
    return head.T @ error.T @ x, error.T @ (x @ body.T)


def by_hand(made, alternate):
    """FedPer, or with `alternate` FedRep: bodies [K, ...] and heads by (client, mode)."""
    start = made.state.modes["theta"].numpy()
    bodies = start[:, : HIDDEN * INPUTS].reshape(K, HIDDEN, INPUTS).copy()
    first = start[0, HIDDEN * INPUTS :].reshape(CLASSES, HIDDEN)
    heads = {}
    for round in range(ROUNDS):
        plan = made.schedule.plan(made.state.schedule, round)
        lr = RATE["lr"] * RATE["lr_decay"] ** (round // RATE["lr_decay_every"])
        for k in sorted(set(plan.mode.tolist())):
            chosen, ends = plan.client[plan.mode == k].tolist(), []
            for i in chosen:
                body, head = bodies[k].copy(), heads.get((i, k), first).copy()
                for _ in range(STEPS if alternate else 0):
                    head = head - lr * gradients(made, i, body, head)[1]
                for _ in range(STEPS):
                    of_body, of_head = gradients(made, i, body, head)
                    body = body - lr * of_body
                    head = head if alternate else head - lr * of_head
                heads[i, k] = head
                ends.append(body)
            bodies[k] = np.average(ends, axis=0, weights=[SIZES[i] for i in chosen])
    return bodies, heads, first


@ENGINES
@pytest.mark.parametrize("alternate", [False, True], ids=["FedPer", "FedRep"])
def test_fedper_and_fedrep(engine, alternate):
    made = federation(engine, personal=["1.*"], alternate=alternate)
    bodies, heads, first = by_hand(made, alternate)
    train(made, ROUNDS)
    own = made.personal_models(range(len(SIZES))).theta.numpy()
    for i in range(len(SIZES)):
        for k in range(K):
            whole = np.concatenate([bodies[k].ravel(), heads.get((i, k), first).ravel()])
            np.testing.assert_allclose(own[i, k], whole, rtol=0, atol=CLOSE)
    # The server's modes have the initial head, the same for all.
    server = made.state.modes["theta"].numpy()
    np.testing.assert_allclose(server[:, : HIDDEN * INPUTS], bodies.reshape(K, -1), atol=CLOSE)
    np.testing.assert_array_equal(server[:, HIDDEN * INPUTS :], np.tile(first.ravel(), (K, 1)))


@ENGINES
def test_fedbn(engine):
    """BatchNorm's parameters and running statistics stay with the client, all others travel."""
    sizes = (6,) * 9  # a smaller batch would be filled up, which changes its statistics
    options = {"personal": ["1.*"], "sizes": sizes}
    made = federation(engine, with_batch_norm, **options)
    modes = [made.ensemble.module(k) for k in range(K)]
    layers, travelling = {}, [name for name, _ in modes[0].named_parameters() if name[:2] != "1."]
    for round in range(ROUNDS):
        plan = made.schedule.plan(made.state.schedule, round)
        for k in sorted(set(plan.mode.tolist())):
            chosen, ends = plan.client[plan.mode == k].tolist(), []
            for i in chosen:
                module = copy.deepcopy(modes[k]).train()
                module[1] = copy.deepcopy(layers.get((i, k), modes[0][1])).train()
                optimizer = torch.optim.SGD(
                    module.parameters(), made.algorithm.learning_rate(round)
                )
                x, y = made.data.client(i)
                for _ in range(STEPS):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(module(x), y).backward()
                    optimizer.step()
                layers[i, k] = module[1]
                ends.append({name: p.detach() for name, p in module.named_parameters()})
            weight = torch.tensor([float(sizes[i]) for i in chosen], dtype=torch.float64)
            for name in travelling:
                mean = torch.einsum(
                    "n,n...->...", weight / weight.sum(), torch.stack([end[name] for end in ends])
                )
                modes[k].get_parameter(name).data.copy_(mean)
    start = made.state.buffers.clone()
    train(made, ROUNDS)
    assert torch.equal(made.state.buffers, start)  # no statistics reach the server
    for (i, k), layer in layers.items():
        own = made.personal_ensemble(i).module(k)
        for name in ("weight", "bias", "running_mean", "running_var"):
            torch.testing.assert_close(
                getattr(own[1], name), getattr(layer, name), rtol=0, atol=CLOSE
            )
        for name in travelling:
            torch.testing.assert_close(
                own.get_parameter(name), modes[k].get_parameter(name), rtol=0, atol=CLOSE
            )


def test_only_the_body_travels():
    """Also in compressed messages, and without the running statistics of personal layers."""
    made = federation(model=with_batch_norm, personal=["1.*", "3.*"])
    report = train(made, 1).run_round()
    body = HIDDEN * INPUTS + HIDDEN
    assert report.bytes_up == report.bytes_down == 4 * 8 * body
    whole = federation(model=with_batch_norm).run_round()
    parameters = body + 2 * HIDDEN + HIDDEN * CLASSES + CLASSES
    assert whole.bytes_down == 4 * 8 * (parameters + 2 * HIDDEN)
    part = federation(model=with_batch_norm, personal=["3.*"]).run_round()
    assert part.bytes_down == whole.bytes_down - 4 * 8 * (HIDDEN * CLASSES + CLASSES)
    sparse = {"algorithm": fe.QSGD(lr=0.1)}
    messages = [
        federation(**sparse, **personal).run_round().bytes_up
        for personal in ({}, {"personal": ["1.*"]})
    ]
    assert messages[1] < messages[0]


def test_momentum_and_adam_train_the_personal_part_as_the_rest():
    """With one client, nothing is averaged: personal parts change nothing at all."""
    for optimizer in ({"name": "sgd", "momentum": 0.9, "weight_decay": 0.01}, {"name": "adam"}):
        algorithm = FedAvg(lr=0.05, optimizer=optimizer)
        options = {"modes": 1, "batch_size": 4, "epochs": 2, "dtype": torch.float64}
        alone = FederatedData.from_arrays(numbers(9, INPUTS), labels(9), [9])
        whole = train(Federation(two_layers, alone, algorithm, **options), 3)
        parts = train(Federation(two_layers, alone, algorithm, personal=["1.*"], **options), 3)
        torch.testing.assert_close(
            parts.personal_models([0]).theta[0], whole.state.modes["theta"], rtol=0, atol=1e-12
        )


def test_partial_work_stops_both_parts():
    """A visit of fewer steps is one of a federation with fewer steps."""
    options = {"personal": ["1.*"], "participation": {"name": "everybody", "stragglers": 1.0}}
    made = train(federation(**options), 4)
    reference = train(federation("loop", **options), 4)
    own, expected = (each.personal_models(range(9)).theta for each in (made, reference))
    torch.testing.assert_close(own, expected, rtol=0, atol=CLOSE)


def test_the_smallest_weights_of_a_run_are_its_clients_own():
    """Tests use the models of the client that a row belongs to, and a saved run keeps them."""
    data = FederatedData.from_arrays(
        numbers(60, INPUTS),
        labels(60),
        [10] * 6,
        x_test=numbers(30, INPUTS, word=5),
        y_test=labels(30, word=6),
        test_owner=torch.arange(30) % 7 - 1,
    )
    made = Federation(two_layers, data, FedAvg(lr=0.5), modes=2, personal=["1.*"], seed=1)
    made.train(5)
    metrics = made.evaluate()
    means = torch.stack(
        [
            (made.ensemble if owner < 0 else made.personal_ensemble(int(owner)))
            .predict(x[None])
            .mean[0]
            for x, owner in zip(data.x_test, data.test_owner, strict=True)
        ]
    )
    accuracy = float((means.argmax(1) == data.y_test).double().mean())
    assert metrics["accuracy"] == pytest.approx(accuracy)
    by_client = made.evaluate_clients()
    for client in range(6):
        own = data.test_owner == client
        right = (means[own].argmax(1) == data.y_test[own]).double().mean()
        assert by_client.values["accuracy"][client] == pytest.approx(float(right))
    assert made.history.records[-1]["test_own"] == by_client.summary()
    others = made.evaluate_clients(own=False).values["nll"]
    assert not torch.equal(others, by_client.values["nll"])


def test_personalize_starts_from_the_clients_own_models():
    made = federation(personal=["1.*"])
    made.data = made.data.with_calibration(0.3)
    train(made, 3)
    result = fe.personalize(made, "select")
    body = payload_bytes({"theta": made.algorithm.broadcast(made.state.modes)["theta"]})
    assert result.bytes_down == len(SIZES) * K * body
    x = numbers(3, INPUTS, word=8)
    for client in (0, 4):
        mode = int(result.choice[client])
        expected = made.personal_ensemble(client).select([mode]).predict(x).mean
        torch.testing.assert_close(result.predict(x, client).mean, expected)


def test_saved_federations_keep_personal_parts(tmp_path):
    made = train(federation(personal=["1.*"], alternate=True), 3)
    loaded = Federation.load(made.save(tmp_path / "run"), model=two_layers, data=made.data)
    assert (loaded.personal, loaded.alternate) == (("1.*",), True)
    for one, two in zip(made.rounds(2), loaded.rounds(2), strict=True):
        assert torch.equal(one.losses, two.losses)
    assert torch.equal(made.personal_models([2]).theta, loaded.personal_models([2]).theta)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"personal": "1.*"}, "personal is a list of patterns"),
        ({"personal": ["head.*"]}, "personal: no parameter matches 'head"),
        ({"personal": ["*"]}, "nothing would travel"),
        ({"alternate": True}, "alternate needs personal"),
        ({"personal": ["1.*"], "alternate": 1}, "alternate is true or false"),
        ({"personal": ["1.*"], "shared": ["0.*"]}, "cannot be used together"),
        ({"personal": ["1.*"], "algorithm": "ditto"}, "have models of their own already"),
        ({"personal": ["1.*"], "algorithm": "fedem"}, "receive all modes at once"),
        ({"personal": ["1.*"], "algorithm": "pfnm"}, "computes with whole models"),
    ],
)
def test_errors(options, text):
    with pytest.raises(InputError, match=text):
        federation(**options)


def test_errors_of_results():
    made = train(federation(personal=["1.*"]), 1)
    with pytest.raises(InputError, match="each client has another"):
        made.calibrate()
    with pytest.raises(InputError, match="a client below 9"):
        made.personal_ensemble(9)
