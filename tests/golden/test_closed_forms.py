"""FedAvg and FedProx on linear regression, where a round is an affine map whose fixed point is
known.
"""

import pytest
import torch
from torch import nn

from fedensemble import FedAvg, FederatedData, Federation, FedProx
from fedensemble.testing.toy_problems import numbers

CLIENTS, FEATURES, STEPS, LR = 5, 3, 4, 0.1
ROUNDS = 200
# The map contracts by less than 0.9 a round, so after 200 rounds only rounding is left, amplified
# by 1 / (1 - 0.9).
FIXED_POINT = 1e-12


def linear():
    return nn.Linear(FEATURES, 1, bias=False)


def quadratics():
    """Data of five clients with different optima, and the A_i, b_i of f_i(w) = w'A_i w / 2 - b_i'w
    + const.
    """
    sizes = [4, 6, 8, 10, 12]
    clients, forms = [], []
    for index, size in enumerate(sizes):
        x = numbers(size, FEATURES, word=10 + index)
        y = x @ numbers(FEATURES, word=20 + index) + 0.1 * numbers(size, word=30 + index)
        clients.append((x, y.unsqueeze(1)))
        # the loss is the mean of squared errors
        forms.append((2 * x.T @ x / size, 2 * x.T @ y / size))
    return FederatedData.from_clients(clients), forms, torch.tensor(sizes, dtype=torch.float64)


def fixed_point(forms, weights, mu=0.0):
    """Where a round of STEPS exact gradient steps at each client, averaged, stands still.

    One step is v <- (I - lr (A + mu I)) v + lr b + lr mu w, so a client maps w to M_i w + c_i; then
    w* solves w = sum p_i (M_i w + c_i).
    """
    eye = torch.eye(FEATURES, dtype=torch.float64)
    matrix, vector = torch.zeros_like(eye), torch.zeros(FEATURES, dtype=torch.float64)
    for (a, b), share in zip(forms, weights / weights.sum(), strict=True):
        step = eye - LR * (a + mu * eye)
        power, total = torch.linalg.matrix_power(step, STEPS), torch.zeros_like(eye)
        for place in range(STEPS):
            total += torch.linalg.matrix_power(step, place)
        matrix += share * (power + total * LR * mu)
        vector += share * total @ (LR * b)
    return torch.linalg.solve(eye - matrix, vector)


def trained(algorithm, data, engine="vector", rounds=ROUNDS, **options):
    federation = Federation(
        linear,
        data,
        algorithm,
        modes=1,
        loss="mse",
        steps=STEPS,
        batch_size=int(data.size.max()),
        engine=engine,
        dtype=torch.float64,
        **options,
    )
    for _ in federation.rounds(rounds):
        pass
    return federation.state.modes["theta"][0]


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("mu", [0.0, 0.5, 5.0])
def test_fixed_point(mu, weighting):
    data, forms, sizes = quadratics()
    weights = sizes if weighting == "examples" else torch.ones_like(sizes)
    expected = fixed_point(forms, weights, mu)
    got = trained(FedProx(lr=LR, mu=mu, weighting=weighting), data)
    torch.testing.assert_close(got, expected, rtol=0, atol=FIXED_POINT)
    a = sum(share * form[0] for share, form in zip(weights, forms, strict=True))
    b = sum(share * form[1] for share, form in zip(weights, forms, strict=True))
    optimum = torch.linalg.solve(a, b)
    # the bias is real: several steps on different optima
    assert float((expected - optimum).norm()) > 1e-4


def test_one_local_step_reaches_the_optimum():
    data, forms, sizes = quadratics()
    a = sum(share * form[0] for share, form in zip(sizes, forms, strict=True))
    b = sum(share * form[1] for share, form in zip(sizes, forms, strict=True))
    federation = Federation(
        linear,
        data,
        FedAvg(lr=LR),
        modes=1,
        loss="mse",
        steps=1,
        batch_size=12,
        dtype=torch.float64,
    )
    for _ in federation.rounds(ROUNDS):
        pass
    torch.testing.assert_close(
        federation.state.modes["theta"][0], torch.linalg.solve(a, b), rtol=0, atol=FIXED_POINT
    )


def test_a_round_of_each_mode_is_the_affine_map():
    """With K modes and full participation, one round moves a mode by the mean over its own clients
    alone.
    """
    data, forms, sizes = quadratics()
    federation = Federation(
        linear,
        data,
        FedAvg(lr=LR),
        modes=3,
        strata=5,
        loss="mse",
        steps=STEPS,
        batch_size=12,
        dtype=torch.float64,
    )
    for _ in range(4):
        before = federation.state.modes["theta"]
        report = next(federation.rounds(1))
        for mode in range(3):
            mine = report.plan.client[report.plan.mode == mode]
            expected = torch.zeros(FEATURES, dtype=torch.float64)
            for client in mine.tolist():
                w = before[mode]
                for _ in range(STEPS):
                    w = w - LR * (forms[client][0] @ w - forms[client][1])
                expected += sizes[client] / sizes[mine].sum() * w
            expected = expected if len(mine) else before[mode]
            torch.testing.assert_close(
                federation.state.modes["theta"][mode], expected, rtol=0, atol=1e-13
            )


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_fedprox_without_pull_is_fedavg_bit_for_bit(engine):
    data, _, _ = quadratics()
    plain, prox = (
        trained(algorithm, data, engine, rounds=5)
        for algorithm in (FedAvg(lr=LR), FedProx(lr=LR, mu=0.0))
    )
    assert torch.equal(plain, prox)


def test_strong_pull_keeps_the_model():
    data, _, _ = quadratics()
    start = Federation(
        linear, data, "fedavg", modes=1, loss="mse", dtype=torch.float64
    ).state.modes["theta"][0]
    moved = trained(FedProx(lr=1e-9, mu=1e8), data, rounds=1)
    # one gradient of size ten, times lr
    torch.testing.assert_close(moved, start, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("decay", "every"), [(0.5, 2), (0.9, 1), (1.0, 10)])
def test_learning_rate_decay(decay, every):
    algorithm = FedAvg(lr=LR, lr_decay=decay, lr_decay_every=every)
    data, forms, sizes = quadratics()
    start = Federation(
        linear, data, "fedavg", modes=1, loss="mse", dtype=torch.float64
    ).state.modes["theta"][0]
    rounds, w = 5, start
    for round in range(rounds):
        rate, total = LR * decay ** (round // every), torch.zeros(FEATURES, dtype=torch.float64)
        assert algorithm.learning_rate(round) == pytest.approx(rate, rel=1e-15)
        for (a, b), size in zip(forms, sizes, strict=True):
            v = w
            for _ in range(STEPS):
                v = v - rate * (a @ v - b)
            total += size * v / sizes.sum()
        w = total
    torch.testing.assert_close(trained(algorithm, data, rounds=rounds), w, rtol=0, atol=1e-13)
