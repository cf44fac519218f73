"""FedAvgM, FedAdagrad, FedAdam and FedYogi against their formulas in NumPy, round by round."""

import numpy as np
import pytest
import torch

from fedensemble import Cohort, FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi, InputError
from fedensemble.testing.toy_problems import numbers

ROUNDS, STEPS, LR = 6, 4, 0.1
SAME_FORMULA = 1e-12  # float64, some tens of operations on numbers of order one


def fedavg_round(regression, w):
    """The mean, by examples, of what exact local steps make of w."""
    ends = []
    for client in range(len(regression.forms)):
        v = w
        for _ in range(STEPS):
            v = v - LR * regression.gradient(client, v)
        ends.append(v)
    return (regression.weights("examples").unsqueeze(1) * torch.stack(ends)).sum(0)


def trajectory(regression, algorithm):
    federation = regression.federation(algorithm, steps=STEPS)
    start = federation.state.modes["theta"][0].clone()
    return start, [federation.state.modes["theta"][0].clone() for _ in federation.rounds(ROUNDS)]


def test_fedavgm(regression):
    beta, server_lr = 0.7, 0.4
    w, got = trajectory(regression, FedAvgM(lr=LR, beta=beta, server_lr=server_lr))
    v = torch.zeros_like(w)
    for theta in got:
        v = beta * v + fedavg_round(regression, w) - w
        w = w + server_lr * v
        torch.testing.assert_close(theta, w, rtol=0, atol=SAME_FORMULA)


def test_fedavgm_without_momentum_is_fedavg(regression):
    _, got = trajectory(regression, FedAvgM(lr=LR, beta=0.0, server_lr=1.0))
    _, expected = trajectory(regression, FedAvg(lr=LR))
    torch.testing.assert_close(got, expected, rtol=0, atol=SAME_FORMULA)


SECOND_MOMENT = {
    FedAdagrad: lambda v, d: v + d**2,
    FedAdam: lambda v, d: 0.9 * v + 0.1 * d**2,
    FedYogi: lambda v, d: v - 0.1 * d**2 * np.sign(v - d**2),
}


def adaptive(kind):
    settings = {"lr": LR, "server_lr": 0.2, "beta1": 0.6, "tau": 0.05}
    return kind(**settings) if kind is FedAdagrad else kind(**settings, beta2=0.9)


@pytest.mark.parametrize("kind", SECOND_MOMENT)
def test_adaptive(kind, regression):
    w, got = trajectory(regression, adaptive(kind))
    w = w.numpy()
    m, v = np.zeros_like(w), np.full_like(w, 0.05**2)
    for theta in got:
        d = fedavg_round(regression, torch.tensor(w)).numpy() - w
        m = 0.6 * m + 0.4 * d
        v = SECOND_MOMENT[kind](v, d)
        w = w + 0.2 * m / (np.sqrt(v) + 0.05)
        np.testing.assert_allclose(theta.numpy(), w, rtol=0, atol=SAME_FORMULA)


@pytest.mark.parametrize("kind", SECOND_MOMENT)
def test_against_flower(kind):
    """The same updates through Flower's strategy of the same name."""
    pytest.importorskip("flwr", reason="flwr is not installed")
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server import strategy

    ours = adaptive(kind)
    betas = {} if kind is FedAdagrad else {"beta_1": 0.6, "beta_2": 0.9}
    if kind is FedAdagrad:
        ours = FedAdagrad(lr=LR, server_lr=0.2, tau=0.05)  # theirs has no momentum either
    theta = numbers(5)
    theirs = getattr(strategy, kind.__name__)(
        initial_parameters=ndarrays_to_parameters([theta.numpy()]), eta=0.2, tau=0.05, **betas
    )
    theirs.v_t = [np.full(5, 0.05**2)]  # the paper's start; Flower's own is zero
    mode = ours.init_mode(theta)
    for round in range(5):
        ends, sizes = numbers(3, 5, word=round + 1), [3, 1, 2]
        results = [
            (None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters([end.numpy()]), size, {}))
            for end, size in zip(ends, sizes, strict=True)
        ]
        # Newer versions of FedAdam correct for the bias of the first rounds, the paper does not;
        # far out it is gone.
        parameters, _ = theirs.aggregate_fit(10_000 + round, results, [])
        mean = (torch.tensor(sizes, dtype=torch.float64).unsqueeze(1) * ends).sum(0) / sum(sizes)
        one = torch.ones(1, dtype=torch.float64)
        mode = ours.server_update(
            mode, {"theta": mean}, Cohort(3 * one, 6 * one, one, 3, 0.5 * one)
        )
        np.testing.assert_allclose(
            mode["theta"].numpy(), parameters_to_ndarrays(parameters)[0], rtol=0, atol=1e-6
        )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (FedAvgM, {"beta": 1.0}),
        (FedAvgM, {"server_lr": 0.0}),
        (FedAdam, {"tau": 0.0}),
        (FedYogi, {"beta2": 1.0}),
    ],
)
def test_bad_settings(kind, settings):
    with pytest.raises(InputError, match=f"{kind.__name__} needs"):
        kind(**settings)
