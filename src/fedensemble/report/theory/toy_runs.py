"""What the reports of the toy regression read from run folders, for `theory.bias_variance`."""

from __future__ import annotations

import numpy as np
import torch

from ...config.build import build_model, model_facts
from ...config.plugins import build_algorithm
from ...config.schema import Config
from ...data import FederatedData
from ...errors import DataError
from ...experiment.storage.ensemble_file import read_ensemble
from ...experiment.storage.run_folder import RunFolder
from ...experiment.studies.reproduce import CellResult
from ...theory import bias_variance
from ...theory.bias_variance import FloatArray


def predictions(result: CellResult, x: torch.Tensor) -> FloatArray:
    """Predictions of every mode of every run at some inputs, [runs, K, B]."""
    if result.runs is None:
        raise DataError(f"{result.cell.label} has not been run.")
    outputs = []
    for config, folder in zip(result.cell.configs, result.runs.folders, strict=True):
        ensemble = read_ensemble(RunFolder(folder).modes_file, config, torch.device("cpu"))
        outputs.append(ensemble.predict(x).modes.double().flatten(2).mean(2).numpy())
    return np.stack(outputs)


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


def finite_variance(config: Config, data: FederatedData, scale: float, modes: int) -> float:
    """The variance left of the random start after the rounds of `config`, for one mode.

    In a round, no client trains a mode with probability (1 - 1/K)^M.
    """
    idle = (1 - 1 / modes) ** config.ensemble.clients_per_round if modes > 1 else 0.0
    phi = features(config, data, data.x)
    hessians = []
    for start, size in zip(data.start.tolist(), data.size.tolist(), strict=True):
        own = phi[start : start + size]
        hessians.append(2 * own.T @ own / size)
    algorithm = build_algorithm(config.algorithm)
    rates = [algorithm.learning_rate(round) for round in range(config.rounds)]
    assert data.x_test is not None
    return bias_variance.finite_variance(
        features(config, data, data.x_test),
        hessians,
        rates,
        steps=config.training.steps or config.training.epochs,
        idle=idle,
        scale=scale,
    )
