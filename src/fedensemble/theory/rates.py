"""Rates: the bound of Theorem 1, drift of a kernel, and exponents of power laws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError

# Eigenvalues below this share of the largest are zero within the precision of a kernel.
_ZERO = 1e-10


def smallest_eigenvalue(kernel: Tensor, nonzero: bool = False) -> float:
    """lambda_min of a symmetric kernel matrix [n, n].

    Args:
        nonzero: the smallest eigenvalue that is not zero within rounding. On a singular kernel,
            the theorem's other assumptions could at best give this rate.
    """
    values = torch.linalg.eigvalsh(kernel.double())
    if nonzero:
        values = values[values > _ZERO * values[-1]]
    return float(values[0])


def training_error_bound(
    start: float,
    *,
    smallest: float,
    points: int,
    epochs: Tensor,
    lr: float,
    gradient_factor: float = 2.0,
) -> Tensor:
    """The bound of Theorem 1 on the mean squared training error after some local epochs.

    bound(t) = exp(-eta_0 lambda_min t / (3 n)) E |f(0) - y|^2, without the term o(eta_0^2).

    The paper's eta_0 is the step of half the squared error, `gradient_factor * lr`. Its n is
    the number of points in one communication round. This must count the clients of all modes: per
    age of K rounds with one epoch each, kernel regression shrinks the squared error by
    exp(-2 eta_0 lambda_min / n_mode), where n_mode counts the points that train the mode in one of
    its rounds. The bound, exp(-eta_0 lambda_min K / (3 n)), follows if K n_mode <= 6 n. With n =
    n_mode it would hold for K <= 6 only.

    Args:
        start: mean squared training error before training.
        smallest: lambda_min of Theta(X, X).
        points: n.
        epochs: local epochs t since the start, counted over rounds, also those without clients.
        lr: learning rate of a model in NTK parametrisation, eta_0 of the paper.
        gradient_factor: 2 for the loss (f - y)^2 per example, 1 for half of it.
    """
    exponent: Tensor = -gradient_factor * lr * smallest * epochs / (3 * points)
    return start * torch.exp(exponent)


def largest_stable_rate(kernel: Tensor, points: int, gradient_factor: float = 2.0) -> float:
    """The learning rate above which gradient descent on these points diverges: 2 n / (g l_max)."""
    return 2 * points / (gradient_factor * float(torch.linalg.eigvalsh(kernel.double())[-1]))


def drift(after: Tensor, before: Tensor) -> float:
    """The relative change of a kernel, |after - before| / |before|, in the Frobenius norm."""
    return float(torch.linalg.norm(after - before) / torch.linalg.norm(before))


class PowerLaw(NamedTuple):
    """A fit y = factor * x^exponent by least squares in log-log coordinates."""

    exponent: float
    factor: float
    error: float  # standard error of the exponent; nan with two points

    def at(self, x: Sequence[float]) -> list[float]:
        """The fitted values."""
        return [self.factor * value**self.exponent for value in x]


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """The power law through positive points.

    >>> law = fit_power_law([1, 4, 16], [3.0, 1.5, 0.75])
    >>> round(law.exponent, 6), round(law.factor, 6)
    (-0.5, 3.0)
    """
    if len(x) != len(y) or len(set(x)) < 2 or min(*x, *y) <= 0:
        raise InputError(
            "A power law needs as many x as y, at least two different x, and values > 0; "
            f"got x = {list(x)}, y = {list(y)}."
        )
    log_x, log_y = np.log(x), np.log(y)
    centred = log_x - log_x.mean()
    exponent = float(centred @ log_y / (centred @ centred))
    rest = log_y - log_y.mean() - exponent * centred
    spread = rest @ rest / (len(x) - 2) if len(x) > 2 else np.nan
    factor = float(np.exp(log_y.mean() - exponent * log_x.mean()))
    return PowerLaw(exponent, factor, float(np.sqrt(spread / (centred @ centred))))
