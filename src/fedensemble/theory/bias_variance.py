"""Bias and variance of the toy regression over runs, and the variance that theory predicts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..config.build import build_model, model_facts
from ..config.plugins import build_algorithm
from ..config.schema import Config
from ..data import FederatedData
from ..errors import DataError
from ..experiment.ensemble_file import read_ensemble
from ..experiment.reproduce import CellResult
from ..experiment.run_folder import RunFolder

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


def predictions(result: CellResult, data: FederatedData) -> FloatArray:
    """Predictions of every mode of every run on the test inputs, [runs, K, B]."""
    if result.runs is None:
        raise DataError(f"{result.cell.label} has not been run.")
    outputs = []
    for config, folder in zip(result.cell.configs, result.runs.folders, strict=True):
        ensemble = read_ensemble(RunFolder(folder).modes_file, config, torch.device("cpu"))
        outputs.append(ensemble.predict(data.x_test).modes.double().flatten(2).mean(2).numpy())
    return np.stack(outputs)


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


def features(config: Config, data: FederatedData, x: torch.Tensor) -> FloatArray:
    """The features that the linear model multiplies by its weights, [B, P]."""
    model = build_model(config.model, model_facts(data, config.training.loss))().double()
    columns = []
    with torch.no_grad():
        weight = next(model.parameters())
        # The output for a one-hot weight vector is one column of the feature matrix.
        for index in range(len(weight)):
            weight.zero_()
            weight[index] = 1
            columns.append(model(x.double()).flatten())
    return torch.stack(columns, 1).numpy()


def limit_variance(at: FloatArray, trained_on: FloatArray, scale: float) -> float:
    """The variance left of the random start in the limit of training: Theorem 2 of the paper.

    The result is the mean of k(x, x). For a model that is linear in its weights, w ~ N(0, scale^2),
    both kernels are inner products of features, and k(x, x) is the prior variance in the directions
    that the training inputs do not determine: scale^2 |(I - P) phi(x)|^2, where P projects on the
    span of the training features.
    """
    _, singular, rows = np.linalg.svd(trained_on, full_matrices=False)
    fitted = rows[singular**2 > NOT_FITTED * singular[0] ** 2]
    residual = at - (at @ fitted.T) @ fitted
    return float(scale**2 * (residual**2).sum(1).mean())


def finite_variance(config: Config, data: FederatedData, scale: float, modes: int) -> float:
    """The variance left of the random start after the rounds of `config`, for one mode.

    A visit of S full-batch steps maps w to A_i w + c_i, where A_i = (I - lr H_i)^S. In a round, no
    client trains a mode with probability (1 - 1/K)^M; otherwise the mean of the A_i is applied. The
    result is thus an expectation over the clients that train the mode.
    """
    rounds, steps = config.rounds, config.training.steps or config.training.epochs
    idle = (1 - 1 / modes) ** config.ensemble.clients_per_round if modes > 1 else 0.0
    phi = features(config, data, data.x)
    eye = np.eye(phi.shape[1])
    hessians = []
    for start, size in zip(data.start.tolist(), data.size.tolist(), strict=True):
        own = phi[start : start + size]
        hessians.append(2 * own.T @ own / size)
    total_map, map_by_rate, algorithm = eye, {}, build_algorithm(config.algorithm)
    for round in range(rounds):
        rate = algorithm.learning_rate(round)
        if rate not in map_by_rate:
            visit_maps = [np.linalg.matrix_power(eye - rate * h, steps) for h in hessians]
            map_by_rate[rate] = idle * eye + (1 - idle) * np.mean(visit_maps, axis=0)
        total_map = map_by_rate[rate] @ total_map
    assert data.x_test is not None
    at = features(config, data, data.x_test) @ total_map
    return float(scale**2 * (at**2).sum(1).mean())
