"""The loss surface on the plane through three modes of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from ...config.build import build_data
from ...data import FederatedData
from ...errors import DataError, InputError
from ...experiment.storage.ensemble_file import read_ensemble
from ...experiment.storage.run_folder import RunFolder
from ...experiment.studies.paper_table import Reproduction
from ...experiment.studies.reproduce import CellResult
from ...predict import Ensemble
from ..palette import LIGHT as COLORS
from ..tables.result_table import TextTable
from .paper_grid import PaperReport, headline
from .plots import STYLE

BATCH = 10_000
MARGIN = 0.25  # of the triangle's extent, on every side
POINTS = 21  # evaluated on the line between two modes


def plane(modes: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal axes [2, P] of the plane through three points [3, P]; their coordinates [3, 2].

    >>> points = torch.tensor([[0.0, 0, 0], [2, 0, 0], [1, 3, 0]], dtype=torch.double)
    >>> axes, coordinates = plane(points)
    >>> coordinates.tolist()
    [[0.0, 0.0], [2.0, 0.0], [1.0, 3.0]]
    """
    first = modes[1] - modes[0]
    first = first / first.norm()
    second = modes[2] - modes[0]
    second = second - (second @ first) * first
    if not float(second.norm()) > 0:
        raise InputError("The three modes lie on one line and span no plane.")
    axes = torch.stack([first, second / second.norm()])
    return axes, (modes - modes[0]) @ axes.T


def loss_at(ensemble: Ensemble, theta: Tensor, buffers: Tensor, data: FederatedData) -> float:
    """Cross-entropy of one model [P] on all of the training examples, in nats, dropout off."""
    total, count = 0.0, 0
    for x, y in zip(torch.split(data.x, BATCH), torch.split(data.y, BATCH), strict=True):
        inputs = data.inputs(x, ensemble.model.dtype)
        logits = ensemble.model.outputs(theta, buffers, inputs)
        total += float(F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum"))
        count += y.numel()
    return total / count


def loss_surface(reproduction: Reproduction, results: Sequence[CellResult]) -> PaperReport:
    """The log training loss on the plane through the first three modes and on their lines."""
    result = results[0]
    if result.runs is None:
        reason = result.cell.skipped or "leave out --only"
        raise DataError(f"The run of {reproduction.name} has not been trained yet: {reason}.")
    config = result.cell.configs[0]
    device = torch.device(config.engine.device)
    ensemble = read_ensemble(RunFolder(result.runs.folders[0]).modes_file, config, device)
    if len(ensemble) < 3:
        raise InputError(
            f"A plane needs three modes; the run has {len(ensemble)}. Raise ensemble.modes."
        )
    data = build_data(config).to(device)
    theta, buffers = ensemble.theta[:3], ensemble.buffers[:3]
    axes, coordinates = plane(theta.double())
    lowest, highest = coordinates.min(0).values, coordinates.max(0).values
    margin = MARGIN * (highest - lowest)
    count = int(reproduction.table.options.get("points", 31))
    grid = [
        torch.linspace(float(a), float(b), count)
        for a, b in zip(lowest - margin, highest + margin, strict=True)
    ]
    losses = np.empty((count, count))
    # Points between modes have no running statistics of their own: they take the modes' mean.
    mean_buffers = buffers.mean(0)
    for row, y in enumerate(grid[1]):
        for column, x in enumerate(grid[0]):
            at = theta[0].double() + float(x) * axes[0] + float(y) * axes[1]
            losses[row, column] = loss_at(ensemble, at.to(theta.dtype), mean_buffers, data)
    lines = {
        (a, b): _losses_between(ensemble, theta[a], theta[b], mean_buffers, data)
        for a, b in ((0, 1), (0, 2), (1, 2))
    }
    mode_losses = [loss_at(ensemble, theta[mode], buffers[mode], data) for mode in range(3)]
    figure = _figure(
        reproduction, [axis.numpy() for axis in grid], losses, coordinates.cpu().numpy(), lines
    )
    rows = [(f"mode {mode + 1}", f"{loss:.4f}") for mode, loss in enumerate(mode_losses)]
    rows += [
        (f"highest between modes {a + 1} and {b + 1}", f"{line.max():.4f}")
        for (a, b), line in lines.items()
    ]
    table = TextTable(headline(reproduction), ("where", "training cross-entropy"), tuple(rows))
    return PaperReport(table, table, {"loss-surface.png": figure})


def _losses_between(
    ensemble: Ensemble, one: Tensor, other: Tensor, buffers: Tensor, data: FederatedData
) -> NDArray[np.float64]:
    """Losses at evenly spaced points of the line from one model to another."""
    shares = torch.linspace(0, 1, POINTS).tolist()
    return np.array(
        [loss_at(ensemble, torch.lerp(one, other, share), buffers, data) for share in shares]
    )


def _figure(
    reproduction: Reproduction,
    grid: Sequence[NDArray[np.float64]],
    losses: NDArray[np.float64],
    coordinates: NDArray[np.float64],
    lines: dict[tuple[int, int], NDArray[np.float64]],
) -> Figure:
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(10.5, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        filled = left.contourf(*grid, np.log(losses), levels=24, cmap="viridis")
        left.contour(*grid, np.log(losses), levels=12, colors="white", linewidths=0.4, alpha=0.5)
        figure.colorbar(filled, ax=left, label="log of the training cross-entropy")
        for number, (x, y) in enumerate(coordinates, start=1):
            left.plot(x, y, marker="^", markersize=9, color="white", markeredgecolor="black")
            left.annotate(
                f"mode {number}",
                (x, y),
                (0, 9),
                textcoords="offset points",
                ha="center",
                color="white",
            )
        left.set(xlabel="distance along mode 1 → mode 2", ylabel="distance across", aspect="equal")
        share = np.linspace(0, 1, POINTS)
        for (a, b), style, color in zip(lines, ("-", "--", ":"), COLORS, strict=False):
            name = f"mode {a + 1} to mode {b + 1}"
            right.plot(
                share, np.log(lines[a, b]), color=color, linestyle=style, linewidth=1.8, label=name
            )
        right.set(
            xlabel="share of the way",
            ylabel="log of the training cross-entropy",
            title="On the lines between",
        )
        right.grid(alpha=0.25)
        right.legend()
        cell, full = reproduction.cells[0], reproduction.scale == "full"
        left.set_title(f"{cell.column}, {cell.row if full else reproduction.scale + ' scale'}")
        return figure
