"""The runs of `fedensemble reproduce theory` in which modes should be posterior samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...config.build import build_data
from ...experiment.studies.reproduce import CellResult
from ...theory import gaussian_process as gp
from ...theory.bias_variance import FloatArray
from ...theory.log_posterior import log_posterior
from ...theory.tangent_kernel import ntk
from .theory_runs import GRID, Limit, circle_grid, outputs, runs_of, start_and_end


@dataclass(frozen=True)
class PosteriorResult:
    """Modes of a small regression, next to the exact posterior or its approximations."""

    label: str
    place: FloatArray  # x or the angle of each point of the grid
    functions: FloatArray  # [K, grid]
    exact: gp.GaussianProcess  # what the modes should be samples of
    other: gp.GaussianProcess | None  # linearised Laplace, for the network
    data: tuple[FloatArray, FloatArray]
    log_posterior: FloatArray  # [K], without the evidence; the MAP has the largest


def posterior_study(result: CellResult) -> PosteriorResult:
    """The modes of a cell's first run and the posterior of its model."""
    (config, folder), *_ = runs_of(result)
    data = build_data(config)
    start, end = start_and_end(config, folder, data)
    noise = float(np.sqrt(config.algorithm["prior_precision"] / 2))  # the prior has precision 1
    linear = config.model["name"] == "rbf"
    if linear:
        assert data.x_test is not None
        grid = data.x_test[:: max(1, len(data.x_test) // GRID)].double()
        place, at = grid.flatten().numpy(), data.x.flatten().numpy()
    else:
        place, grid = circle_grid()
        at = torch.atan2(data.x[:, 1], data.x[:, 0]).numpy()
    x, y = data.x.double(), data.y.double().flatten()
    model = end.module(0).double()
    train, cross, both = ntk(model, x), ntk(model, grid, x), ntk(model, grid)
    laplace = gp.regression(train, cross, both, y, noise)
    if linear:
        exact, other = laplace, None
    else:
        # Training a wide network from its own start: the sandwich with a ridge, and f(0) not drawn
        # from GP(0, Theta) but from the narrower GP(0, K).
        limit = Limit.of(config, data)
        training = gp.limit_map(limit.train.ntk, limit.cross.ntk, ridge=noise**2)
        exact = training.process(
            limit.train.nngp, limit.cross.nngp, limit.grid.nngp, y, target_noise=noise
        )
        # Laplace at the first mode: its covariance, around that mode's own function.
        other = gp.GaussianProcess(outputs(end, grid)[0], laplace.covariance)
    value = log_posterior(
        end, data, noise=noise, prior_precision=1.0, anchors=None if linear else start.theta
    )
    return PosteriorResult(
        result.cell.column,
        place,
        outputs(end, grid).numpy(),
        exact,
        other,
        (at, y.numpy()),
        value.numpy(),
    )
