"""Bias and variance of an ensemble over runs, and the variance that theory predicts.

For the average of K modes f_1 .. f_K, over random runs,

    E |mean_k f_k - truth|^2 = |E f - truth|^2 + V_K,    V_K = V_1 (rho + (1 - rho) / K),

where rho is the correlation of two modes of a run. The paper's corollary, V_K = V_1 / K, is the
case rho = 0: independent modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .rates import fit_power_law

FloatArray = NDArray[np.float64]
# Eigenvalues below this share of the largest are zero within double precision: the training data
# do not determine the weights in those directions.
NOT_FITTED = 1e-10


class BiasVariance(NamedTuple):
    """Bias and variance over the runs with one number of modes K."""

    modes: int
    runs: int
    bias: float  # root of the squared bias, as in the paper
    variance: float


def decompose(members: FloatArray, truth: FloatArray) -> BiasVariance:
    """Bias and variance over runs of the average of the modes, from predictions [runs, K, B].

    >>> split = decompose(np.array([[[1.0]], [[3.0]]]), np.array([0.0]))
    >>> split.bias, split.variance
    (2.0, 1.0)
    """
    runs, modes, _ = members.shape
    averaged = members.mean(1)
    mean = averaged.mean(0)
    bias, variance = np.sqrt(((mean - truth) ** 2).mean()), ((averaged - mean) ** 2).mean()
    return BiasVariance(modes, runs, float(bias), float(variance))


def variance_by_modes(members: FloatArray, sizes: Sequence[int]) -> list[float]:
    """The variance over runs of the average of K modes, for each K, from [runs, modes, B].

    A run with more modes than K gives several disjoint averages; their variances over runs are
    averaged. The runs must be independent.
    """
    runs, modes, _ = members.shape
    if runs < 2 or not sizes or min(sizes) < 1 or max(sizes) > modes:
        raise InputError(
            f"variance_by_modes() needs 2 runs or more and sizes from 1 to {modes}; "
            f"got {runs} runs and sizes {list(sizes)}."
        )
    variances = []
    for size in sizes:
        groups = members[:, : modes // size * size].reshape(runs, modes // size, size, -1)
        variances.append(float(groups.mean(2).var(0, ddof=1).mean()))
    return variances


def exponent_in_modes(members: FloatArray, sizes: Sequence[int]) -> tuple[float, float]:
    """The exponent of the variance in K, and its standard error by the jackknife over runs.

    -1 is independent modes. Arguments as for `variance_by_modes`.
    """
    runs = len(members)
    every = fit_power_law(sizes, variance_by_modes(members, sizes)).exponent
    left_out = np.array(
        [
            fit_power_law(sizes, variance_by_modes(np.delete(members, i, 0), sizes)).exponent
            for i in range(runs)
        ]
    )
    return every, float(np.sqrt((runs - 1) * left_out.var()))


def correlation(members: FloatArray) -> float:
    """The correlation rho of two modes of a run, averaged over inputs, from [runs, K, B]."""
    modes = members.shape[1]
    one, every = variance_by_modes(members, [1, modes])
    return float((modes * every / one - 1) / (modes - 1))


def limit_variance(at: FloatArray, trained_on: FloatArray, scale: float) -> float:
    """The variance left of the random start in the limit of training: Theorem 2 of the paper.

    The result is the mean of k(x, x). For a model that is linear in its weights, w ~ N(0, scale^2),
    both kernels are inner products of features, and k(x, x) is the prior variance in the directions
    that the training inputs do not determine: scale^2 |(I - P) phi(x)|^2, where P projects on the
    span of the training features. This is `gaussian_process.posterior`, without its cancellation of
    kernels and for features that are linearly dependent.

    Args:
        at: features of the inputs where the variance is wanted, [B, P].
        trained_on: features of the training inputs, [n, P].
        scale: standard deviation of the start.
    """
    _, singular, rows = np.linalg.svd(trained_on, full_matrices=False)
    fitted = rows[singular**2 > NOT_FITTED * singular[0] ** 2]
    residual = at - (at @ fitted.T) @ fitted
    return float(scale**2 * (residual**2).sum(1).mean())


def finite_variance(
    at: FloatArray,
    hessians: Sequence[FloatArray],
    rates: Sequence[float],
    *,
    steps: int,
    idle: float,
    scale: float,
) -> float:
    """The variance left of the random start after some rounds, for one mode of a linear model.

    A visit of S full-batch steps maps w to A_i w + c_i, where A_i = (I - lr H_i)^S. With
    probability `idle` a mode has no client in a round; otherwise the mean of the A_i is applied.
    The result is thus an expectation over the clients that train the mode.

    Args:
        at: features of the inputs where the variance is wanted, [B, P].
        hessians: Hessian H_i of each client's loss, [P, P].
        rates: learning rate of each round.
        steps: S.
        scale: standard deviation of the start.
    """
    eye = np.eye(at.shape[1])
    total_map, map_by_rate = eye, {}
    for rate in rates:
        if rate not in map_by_rate:
            visit_maps = [np.linalg.matrix_power(eye - rate * h, steps) for h in hessians]
            map_by_rate[rate] = idle * eye + (1 - idle) * np.mean(visit_maps, axis=0)
        total_map = map_by_rate[rate] @ total_map
    return float(scale**2 * ((at @ total_map) ** 2).sum(1).mean())
