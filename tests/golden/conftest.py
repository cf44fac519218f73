"""Linear regression on clients that disagree: quadratics f_i(w) = w'A_i w / 2 - b_i'w whose optimum
is known.
"""

import pytest
import torch
from torch import nn

from fedensemble import FederatedData, Federation
from fedensemble.testing.toy_problems import numbers

FEATURES = 3
SIZES = (4, 6, 8, 10, 12)


class Regression:
    """The clients' data, the A_i and b_i of their loss (a mean of squares), and federations that
    train on them.
    """

    def __init__(self):
        clients, self.forms = [], []
        for index, size in enumerate(SIZES):
            x = numbers(size, FEATURES, word=10 + index)
            y = x @ numbers(FEATURES, word=20 + index) + 0.1 * numbers(size, word=30 + index)
            clients.append((x, y.unsqueeze(1)))
            self.forms.append((2 * x.T @ x / size, 2 * x.T @ y / size))
        self.data = FederatedData.from_clients(clients)

    def weights(self, weighting):
        sizes = torch.tensor(SIZES, dtype=torch.float64)
        return (
            sizes / sizes.sum()
            if weighting == "examples"
            else torch.full_like(sizes, 1 / len(SIZES))
        )

    def gradient(self, client, w):
        a, b = self.forms[client]
        return a @ w - b

    def optimum(self, weighting="uniform"):
        shares = self.weights(weighting)
        a, b = (
            sum(s * form[part] for s, form in zip(shares, self.forms, strict=True))
            for part in (0, 1)
        )
        return torch.linalg.solve(a, b)

    def federation(self, algorithm, steps=4, engine="vector", **options):
        """Exact gradients: every batch is all a client has."""
        return Federation(
            lambda: nn.Linear(FEATURES, 1, bias=False),
            self.data,
            algorithm,
            loss="mse",
            steps=steps,
            batch_size=max(SIZES),
            engine=engine,
            dtype=torch.float64,
            **{"modes": 1, **options},
        )

    def trained(self, algorithm, rounds, **options):
        federation = self.federation(algorithm, **options)
        for _ in federation.rounds(rounds):
            pass
        return federation

    def mean_memory(self, federation, name):
        """The weighted mean over all clients of what they remember; those that never took part have
        zero.
        """
        memory = federation.engine.client_state_tensors()
        weights = self.weights(federation.algorithm.weighting)[memory["visits"][:, 0]]
        return weights @ memory[f"row.{name}"]

    def error(self, algorithm, rounds, **options):
        """Largest distance to the optimum after training, over weights and modes."""
        theta = self.trained(algorithm, rounds, **options).state.modes["theta"]
        return float((theta - self.optimum(algorithm.weighting)).abs().max())


@pytest.fixture(scope="session")
def regression():
    return Regression()
