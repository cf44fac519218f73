"""Compares the runs of `fedensemble reproduce theory` with the closed forms of `theory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...config.build import build_data, build_federation
from ...config.schema import Config
from ...data import FederatedData
from ...errors import DataError
from ...experiment.storage.ensemble_file import read_ensemble
from ...experiment.storage.run_folder import RunFolder
from ...experiment.studies.reproduce import CellResult
from ...predict import Ensemble
from ...theory import gaussian_process as gp
from ...theory.bias_variance import FloatArray, correlation, exponent_in_modes, variance_by_modes
from ...theory.infinite_width import Kernels, relu_kernels
from ...theory.rates import drift, smallest_eigenvalue, training_error_bound
from ...theory.tangent_kernel import ntk

GRID = 120  # inputs at which functions are compared
# Principal directions with a smaller share of the largest variance are not tested: the process
# almost fixes the functions there, and effects of finite width dominate.
SHARE = 0.02


def circle_grid() -> tuple[FloatArray, Tensor]:
    """Angles, and the points of the unit circle at them, [GRID] and [GRID, 2]."""
    angle = 2 * np.pi * (np.arange(GRID) / GRID - 0.5)
    return angle, torch.from_numpy(np.stack([np.cos(angle), np.sin(angle)], 1))


def kernel_options(config: Config) -> dict[str, Any]:
    """The options of `relu_kernels` for the model of a config."""
    return {name: config.model[name] for name in ("depth", "weight_scale", "bias_scale")}


@dataclass(frozen=True)
class Limit:
    """Kernels of the infinitely wide network at the training inputs and at the grid."""

    train: Kernels
    cross: Kernels  # [grid, n]
    grid: Kernels
    targets: Tensor  # [n]

    @classmethod
    def of(cls, config: Config, data: FederatedData) -> Limit:
        """The kernels for the model and the data of a config."""
        options = kernel_options(config)
        x, grid = data.x.double(), circle_grid()[1]
        return cls(
            relu_kernels(x, **options),
            relu_kernels(grid, x, **options),
            relu_kernels(grid, **options),
            data.y.double().flatten(),
        )

    def process(self) -> gp.GaussianProcess:
        """The Gaussian process of Theorem 2 at the grid."""
        return gp.posterior(self.train, self.cross, self.grid, self.targets)


@dataclass
class WidthResult:
    """What the runs with one width show."""

    width: int
    rounds: list[int] = field(default_factory=list)
    error: list[FloatArray] = field(default_factory=list)  # per run, mean over modes at `rounds`
    worst: list[FloatArray] = field(default_factory=list)  # the same, largest over modes
    bound: list[FloatArray] = field(default_factory=list)  # per run, of the mean over modes
    functions: list[FloatArray] = field(default_factory=list)  # [K, grid] per run
    # standardised principal scores of each mode in the process of Theorem 2, and in that of its own
    # rounds
    limit_scores: list[FloatArray] = field(default_factory=list)
    scores: list[FloatArray] = field(default_factory=list)
    distance: list[float] = field(default_factory=list)  # per mode, to the linear model's function
    drift: list[float] = field(default_factory=list)  # per mode, from the kernel at its start
    to_limit: list[float] = field(default_factory=list)  # per mode, to the limit kernel


def start_and_end(
    config: Config, folder: RunFolder, data: FederatedData
) -> tuple[Ensemble, Ensemble]:
    """The modes of a run before and after training."""
    start = build_federation(config, data).ensemble
    return start, read_ensemble(folder.modes_file, config, torch.device("cpu"))


def outputs(ensemble: Ensemble, x: Tensor) -> Tensor:
    """The predictions of the modes of a regression with one output, float64 [K, B]."""
    return ensemble.predict(x).modes.double().flatten(1)


def runs_of(result: CellResult) -> list[tuple[Config, RunFolder]]:
    """The runs of a cell."""
    if result.runs is None:
        raise DataError(f"{result.cell.label} has not been run.")
    return [
        (config, RunFolder(path))
        for config, path in zip(result.cell.configs, result.runs.folders, strict=True)
    ]


class WidthStudy:
    """Evaluates runs of several widths; the maps of training are shared between widths."""

    def __init__(self) -> None:
        self.limit: Limit | None = None  # known after the first call of `evaluate`
        self._maps: dict[int, list[gp.TrainingMap]] = {}

    def evaluate(self, result: CellResult) -> WidthResult:
        """The result of the runs of one cell."""
        config = result.cell.configs[0]
        found = WidthResult(int(config.model["width"]))
        data = build_data(config)
        self.limit = limit = Limit.of(config, data)
        grid = circle_grid()[1]
        x, process = data.x.double(), limit.process()
        for config, folder in runs_of(result):
            start, end = start_and_end(config, folder, data)
            add_errors(found, config, folder, start, data, smallest_eigenvalue(limit.train.ntk))
            before, after = outputs(start, grid), outputs(end, grid)
            for mode, training in enumerate(self._training_maps(config, data, limit)):
                linear = training.apply(outputs(start, x)[mode], before[mode], limit.targets)
                own = training.process(
                    limit.train.nngp, limit.cross.nngp, limit.grid.nngp, limit.targets
                )
                for into, expected in ((found.limit_scores, process), (found.scores, own)):
                    into.append(expected.principal_scores(after[mode], SHARE).numpy())
                found.distance.append(float((linear - after[mode]).square().mean().sqrt()))
                kernels = [ntk(ensemble.module(mode).double(), x) for ensemble in (start, end)]
                found.drift.append(drift(kernels[1], kernels[0]))
                found.to_limit.append(drift(kernels[1], limit.train.ntk))
            found.functions.append(after.numpy())
        return found

    def _training_maps(
        self, config: Config, data: FederatedData, limit: Limit
    ) -> list[gp.TrainingMap]:
        """The map of each mode's rounds, by the seed of the run."""
        if config.seed not in self._maps:
            schedule = build_federation(config, data).schedule
            self._maps[config.seed] = [
                gp.finite_map(
                    limit.train.ntk,
                    limit.cross.ntk,
                    client_rows(data),
                    gp.visits(schedule, len(data), config.seed, config.rounds, mode),
                    rates=config.algorithm["lr"],
                    steps=config.training.steps,
                )
                for mode in range(config.ensemble.modes)
            ]
        return self._maps[config.seed]


def client_rows(data: FederatedData) -> list[Tensor]:
    """The rows of the data that each client holds."""
    bounds = zip(data.start.tolist(), data.size.tolist(), strict=True)
    return [torch.arange(start, start + size) for start, size in bounds]


def add_errors(
    found: WidthResult,
    config: Config,
    folder: RunFolder,
    start: Ensemble,
    data: FederatedData,
    smallest: float,
) -> None:
    """Adds the training errors of a run's rounds, and the bound of Theorem 1, to a result.

    The test set of these runs is the training set.
    """
    tested = [record for record in folder.metrics() if "test" in record]
    errors = (outputs(start, data.x.double()) - data.y.double().flatten()).square().mean(1)
    found.rounds = [0, *(record["round"] for record in tested)]
    epochs = torch.tensor(found.rounds).double() * (config.training.steps or 1)
    for name, first, into in (
        ("mode_mse_mean", errors.mean(), found.error),
        ("mode_mse_max", errors.max(), found.worst),
    ):
        into.append(np.array([float(first), *(record["test"][name] for record in tested)]))
    bound = training_error_bound(
        float(errors.mean()),
        smallest=smallest,
        points=len(data.x),
        epochs=epochs,
        lr=config.algorithm["lr"],
    )
    found.bound.append(bound.numpy())


def broken(result: CellResult) -> WidthResult:
    """Training errors of runs in which an assumption is broken, and the bound without it."""
    config = result.cell.configs[0]
    data = build_data(config)
    # Of the distinct inputs: with equal ones the kernel is singular, and the bound constant.
    kernel = relu_kernels(torch.unique(data.x.double(), dim=0), **kernel_options(config)).ntk
    found = WidthResult(int(config.model["width"]))
    for config, folder in runs_of(result):
        start, _ = start_and_end(config, folder, data)
        add_errors(found, config, folder, start, data, smallest_eigenvalue(kernel))
    return found


@dataclass(frozen=True)
class VarianceResult:
    """The variance over runs of the average of K modes."""

    label: str
    sizes: Sequence[int]
    variances: Sequence[float]
    correlation: float
    exponent: float
    error: float  # standard error of the exponent


def variance_study(result: CellResult) -> VarianceResult:
    """The variance over the runs of a cell, by the number of modes."""
    grid = circle_grid()[1]
    members = np.stack(
        [
            outputs(read_ensemble(folder.modes_file, config, torch.device("cpu")), grid).numpy()
            for config, folder in runs_of(result)
        ]
    )
    modes = members.shape[1]
    sizes = [size for size in range(1, modes + 1) if modes % size == 0]
    return VarianceResult(
        result.cell.column,
        sizes,
        variance_by_modes(members, sizes),
        correlation(members),
        *exponent_in_modes(members, sizes),
    )
