"""The toy regression in numbers: bias and variance over runs, and what theory says of the
variance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..config.build import build_model, model_facts
from ..config.schema import Config
from ..data import FederatedData
from ..errors import DataError
from ..experiment.ensemble_file import read_ensemble
from ..experiment.reproduce import CellResult
from ..experiment.run_folder import RunFolder

Numbers = NDArray[np.float64]
# of the largest eigenvalue: directions the data do not decide within double precision
NOT_FITTED = 1e-10


class Split(NamedTuple):
    """What the runs of one K come to."""

    modes: int
    runs: int
    bias: float  # root of the squared bias, as in the paper
    variance: float


def predictions(result: CellResult, data: FederatedData) -> Numbers:
    """What every mode of every run says of the test inputs, [runs, K, B]."""
    if result.runs is None:
        raise DataError(f"{result.cell.label} has not been run.")
    said = []
    for config, folder in zip(result.cell.configs, result.runs.folders, strict=True):
        ensemble = read_ensemble(RunFolder(folder).modes_file, config, torch.device("cpu"))
        said.append(ensemble.predict(data.x_test).modes.double().flatten(2).mean(2).numpy())
    return np.stack(said)


def decompose(members: Numbers, truth: Numbers) -> Split:
    """Bias and variance of the modes' average over runs [runs, K, B], around their mean over runs.

    >>> split = decompose(np.array([[[1.0]], [[3.0]]]), np.array([0.0]))
    >>> split.bias, split.variance
    (2.0, 1.0)
    """
    runs, modes, _ = members.shape
    averaged = members.mean(1)
    mean = averaged.mean(0)
    bias, variance = np.sqrt(((mean - truth) ** 2).mean()), ((averaged - mean) ** 2).mean()
    return Split(modes, runs, float(bias), float(variance))


def features(config: Config, data: FederatedData, x: torch.Tensor) -> Numbers:
    """The model's features, [B, P]: what multiplies its weights."""
    model = build_model(config.model, model_facts(data, config.training.loss))().double()
    columns = []
    with torch.no_grad():
        weight = next(model.parameters())
        for place in range(len(weight)):
            weight.zero_()
            weight[place] = 1
            columns.append(model(x.double()).flatten())
    return torch.stack(columns, 1).numpy()


def limit_variance(at: Numbers, trained_on: Numbers, scale: float) -> float:
    """Theorem 2 of the paper, the mean of k(x, x): what is left of a random start after endless
    training.

    For a model linear in its weights, w ~ N(0, scale^2), both kernels are products of features, and
    k(x, x) is the prior variance of what the training inputs leave open: scale^2 |(I - P)
    phi(x)|^2, P the projection on them.
    """
    _, size, rows = np.linalg.svd(trained_on, full_matrices=False)
    seen = rows[size**2 > NOT_FITTED * size[0] ** 2]
    left = at - (at @ seen.T) @ seen
    return float(scale**2 * (left**2).sum(1).mean())


def finite_variance(config: Config, data: FederatedData, scale: float, modes: int) -> float:
    """The same after as many rounds as were trained: what a mode keeps of its start, the mean over
    who trains it.

    A visit of S full-batch steps maps w to A_i w + c_i, A_i = (I - lr H_i)^S; in a round a mode is
    left alone with probability (1 - 1/K)^M, and otherwise moves by the mean of the A_i.
    """
    rounds, steps = config.rounds, config.training.steps or config.training.epochs
    idle = (1 - 1 / modes) ** config.ensemble.clients_per_round if modes > 1 else 0.0
    phi = features(config, data, data.x)
    eye = np.eye(phi.shape[1])
    slopes = []
    for start, size in zip(data.start.tolist(), data.size.tolist(), strict=True):
        mine = phi[start : start + size]
        slopes.append(2 * mine.T @ mine / size)
    kept, by_rate = eye, {}
    for number in range(rounds):
        rate = config.algorithm["lr"] * config.algorithm["lr_decay"] ** (
            number // config.algorithm["lr_decay_every"]
        )
        if rate not in by_rate:
            moved = np.mean(
                [np.linalg.matrix_power(eye - rate * slope, steps) for slope in slopes], axis=0
            )
            by_rate[rate] = idle * eye + (1 - idle) * moved
        kept = by_rate[rate] @ kept
    assert data.x_test is not None
    at = features(config, data, data.x_test) @ kept
    return float(scale**2 * (at**2).sum(1).mean())
