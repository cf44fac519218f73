"""The Gaussian process of Theorem 2: the distribution of a mode after training, in function space.

With a fixed kernel Theta, training is linear in the outputs. A mode that starts at f_0 ends at

    f(x) = f_0(x) + M(x) (Y - f_0(X)),                                                       (1)

where M(x), [1, n], depends on the training but not on f_0. If f_0 is a Gaussian process with
covariance K, so is f, with

    m(x) = M(x) Y,
    k(x, x') = K(x, x') - M(x) K(X, x') - K(x, X) M(x')^T + M(x) K(X, X) M(x')^T.            (2)

In the limit of training M(x) = Theta(x, X) Theta(X, X)^-1, and (2) is the sandwich of Theorem 2.
After finitely many rounds of federated averaging, M follows from the clients that trained the mode
in each round: client i changes the outputs by

    f(x) <- f(x) - Theta(x, X_i) phi(Theta(X_i, X_i)) (f(X_i) - Y_i),
    phi(l) = (1 - exp(-g t l / n_i)) / l                      gradient flow for a time t, or
    phi(l) = (1 - (1 - g lr l / n_i)^S) / l                   S steps of gradient descent,

and the server averages these changes over the round's clients. The factor g is 2 for the mean
squared error and 1 for the paper's loss, half of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.schedule import Schedule
from ..errors import InputError
from .infinite_width import Kernels

MSE, HALF_MSE = 2.0, 1.0  # derivative of the loss of one example, divided by the residual


@dataclass(frozen=True)
class GaussianProcess:
    """A Gaussian process at m inputs: mean [m] and covariance [m, m]."""

    mean: Tensor
    covariance: Tensor

    @property
    def standard_deviation(self) -> Tensor:
        """The standard deviation at each input, [m]; rounding below zero counts as zero."""
        return self.covariance.diagonal().clamp(min=0).sqrt()

    def principal_scores(self, functions: Tensor, share: float = 0.01) -> Tensor:
        """Standardised principal scores of functions [K, m], [K, r].

        They are independent standard normal values if the functions are samples of the process.
        Directions with less than `share` of the largest variance are left out: dividing by a
        variance of almost zero would show rounding and effects of finite width only.
        """
        values, vectors = torch.linalg.eigh(self.covariance)
        kept = values > share * values[-1]
        scores: Tensor = (functions - self.mean) @ vectors[:, kept] / values[kept].sqrt()
        return scores


@dataclass(frozen=True)
class TrainingMap:
    """The affine map (1) from a mode's start to its end, at the training and other inputs.

    Args:
        at_train: M at the n training inputs, [n, n].
        at_test: M at m other inputs, [m, n].
    """

    at_train: Tensor
    at_test: Tensor

    def apply(self, start_train: Tensor, start_test: Tensor, targets: Tensor) -> Tensor:
        """The outputs at the other inputs after training, from those at the start, [..., m]."""
        return start_test + (targets - start_train) @ self.at_test.mT

    def process(
        self,
        train: Tensor,
        test_train: Tensor,
        test: Tensor,
        targets: Tensor,
        target_noise: float = 0.0,
    ) -> GaussianProcess:
        """The Gaussian process (2) at the other inputs.

        Args:
            train, test_train, test: covariance K of the start, [n, n], [m, n] and [m, m].
            targets: Y, [n].
            target_noise: standard deviation of noise that each mode adds to its own targets.
        """
        linear = self.at_test
        cross = linear @ test_train.mT
        covariance = test - cross - cross.mT + linear @ train @ linear.mT
        covariance = covariance + target_noise**2 * linear @ linear.mT
        return GaussianProcess(linear @ targets, (covariance + covariance.mT) / 2)


def limit_map(train: Tensor, test_train: Tensor, ridge: float = 0.0) -> TrainingMap:
    """The map of endless training: M = Theta(x, X) (Theta(X, X) + ridge)^-1.

    Args:
        train, test_train: Theta, [n, n] and [m, n].
        ridge: n times the strength of a penalty ridge / (2 n) |w - w_0|^2 on the way from the
            start, in the units of the loss (f - y)^2 / (2 n).
    """
    matrix = train + ridge * torch.eye(len(train), dtype=train.dtype)
    if ridge == 0 and torch.linalg.eigvalsh(train)[0] <= 1e-12 * train.diagonal().max():
        raise InputError(
            "Theta(X, X) is singular, so Theorem 2 has no limit: two training inputs may be equal, "
            "or the model may have too few parameters. Pass a ridge > 0."
        )
    both = torch.linalg.solve(matrix, torch.cat([train, test_train]).mT).mT
    return TrainingMap(both[: len(train)], both[len(train) :])


def posterior(
    train: Kernels, test_train: Kernels, test: Kernels, targets: Tensor
) -> GaussianProcess:
    """The Gaussian process of Theorem 2: what the modes are samples of, after endless training."""
    training = limit_map(train.ntk, test_train.ntk)
    return training.process(train.nngp, test_train.nngp, test.nngp, targets)


def finite_map(
    train: Tensor,
    test_train: Tensor,
    clients: Sequence[Tensor],
    rounds: Iterable[Tensor],
    *,
    rates: float | Sequence[float],
    steps: int | None = None,
    gradient_factor: float = MSE,
) -> TrainingMap:
    """The map after finitely many rounds of federated averaging on full local batches.

    Args:
        train, test_train: Theta, [n, n] and [m, n].
        clients: rows of X that each client holds.
        rounds: the clients that train the mode in each round; empty if it is idle, see `visits`.
        rates: learning rate of each round, or one for all. Without `steps`, it is the time for
            which each client follows the gradient flow in a round.
        steps: local steps of gradient descent; None is gradient flow.
        gradient_factor: MSE or HALF_MSE.
    """
    both = torch.cat([train, test_train])
    mapped = torch.zeros_like(both)  # M, of which the first n rows are at the training inputs
    eye = torch.eye(len(train), dtype=train.dtype)
    updates: dict[tuple[int, float], Tensor] = {}  # of a client at a rate, [n + m, n_i]
    eigen = [torch.linalg.eigh(train[rows][:, rows]) for rows in clients]
    for number, visitors in enumerate(rounds):
        if not len(visitors):
            continue
        rate = rates if isinstance(rates, (int, float)) else rates[number]
        sizes = torch.tensor([len(clients[i]) for i in visitors], dtype=train.dtype)
        remaining = eye - mapped[: len(train)]
        change = torch.zeros_like(mapped)
        for i, share in zip(visitors.tolist(), sizes / sizes.sum(), strict=True):
            rows = clients[i]
            if (i, rate) not in updates:
                values, vectors = eigen[i]
                phi = _phi(values, gradient_factor * rate / len(rows), steps)
                updates[i, rate] = both[:, rows] @ ((vectors * phi) @ vectors.mT)
            change += share * (updates[i, rate] @ remaining[rows])
        mapped = mapped + change
    return TrainingMap(mapped[: len(train)], mapped[len(train) :])


def _phi(values: Tensor, speed: float, steps: int | None) -> Tensor:
    """The function phi of the module's docstring at the eigenvalues of a client's kernel."""
    if steps is None:
        full = -torch.expm1(-speed * values)
        at_zero = speed
    else:
        full, at_zero = 1 - (1 - speed * values) ** steps, speed * steps
    zero = values.abs() <= 1e-14 * values.abs().max()
    return torch.where(zero, at_zero, full / torch.where(zero, 1, values))


def visits(schedule: Schedule, clients: int, seed: int, rounds: int, mode: int) -> list[Tensor]:
    """The clients that train a mode in each round of a schedule, for `finite_map`."""
    state = schedule.init(clients, seed)
    plans = (schedule.plan(state, number) for number in range(rounds))
    return [plan.client[plan.mode == mode] for plan in plans]


def regression(
    train: Tensor, test_train: Tensor, test: Tensor, targets: Tensor, noise: float
) -> GaussianProcess:
    """The posterior of f ~ GP(0, k) given y = f(x) + N(0, noise^2): Gaussian process regression.

    With k = phi(x) . phi(x') / alpha it is the posterior of a linear model with prior precision
    alpha. With the empirical NTK at a mode, divided by alpha, its covariance is that of the
    linearised Laplace approximation with the generalised Gauss-Newton matrix.

    Args:
        train, test_train, test: k, [n, n], [m, n] and [m, m].
        noise: standard deviation of the targets.
    """
    matrix = train + noise**2 * torch.eye(len(train), dtype=train.dtype)
    solved = torch.linalg.solve(matrix, test_train.mT).mT
    covariance = test - solved @ test_train.mT
    return GaussianProcess(solved @ targets, (covariance + covariance.mT) / 2)
