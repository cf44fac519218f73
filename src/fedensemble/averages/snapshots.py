"""Temporal ensemble: the last models of each mode predict together.

With the cyclic learning rate of `lr_cycle`, and a snapshot at the end of each cycle, this is fast
geometric ensembling.

Reference: Garipov, Izmailov, Podoprikhin, Vetrov, Wilson, "Loss surfaces, mode connectivity, and
fast ensembling of DNNs", NeurIPS 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.average import Predictors, averages
from ..errors import InputError
from ..flat_params import Tree
from .periodic import Periodic

_MAX_COUNT = 10_000  # all snapshots of a mode are in memory at the same time


@averages.register("snapshots")
@dataclass(frozen=True, kw_only=True)
class Snapshots(Periodic):
    """The mean prediction of the last snapshots of each mode.

    `Ensemble.module` returns the newest snapshot. Before the first snapshot, the current modes
    predict.

    Args:
        count: number of snapshots of a mode that predict, S. While a mode has fewer than another
            one, it repeats its own in turn.
    """

    count: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.count <= _MAX_COUNT:
            raise InputError(f"Snapshots needs count from 1 to {_MAX_COUNT}; got {self.count}.")

    def init_models(self, theta: Tensor, buffers: Tensor) -> Tree:
        modes = len(theta)
        return {
            "snapshots": theta.new_zeros(modes, self.count, theta.shape[1]),
            "snapshot_buffers": buffers.new_zeros(modes, self.count, buffers.shape[1]),
        }

    def add_models(self, state: Tree, theta: Tensor, buffers: Tensor, count: Tensor) -> Tree:
        """The snapshots from the oldest to the newest, which is in the last place."""
        models = {"snapshots": theta, "snapshot_buffers": buffers}
        return {
            name: torch.cat([state[name][:, 1:], value.unsqueeze(1)], 1)
            for name, value in models.items()
        }

    def center(self, state: Tree, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        collected = state["collected"] > 0
        return (
            torch.where(collected, state["snapshots"][:, -1], theta),
            torch.where(collected, state["snapshot_buffers"][:, -1], buffers),
        )

    def predictors(self, state: Tree, theta: Tensor, buffers: Tensor, seed: int) -> Predictors:
        """The snapshots from the oldest to the newest; as many as the mode with the most has."""
        available = state["collected"].clamp(max=self.count)  # [K, 1]
        most = max(int(available.max()), 1)
        position = torch.arange(most, device=theta.device)
        place = self.count - available + position % available.clamp(min=1)  # [K, most]
        # A mode without snapshots has no valid place; its current model is used instead.
        missing = (available == 0).unsqueeze(-1)
        place = place.clamp(max=self.count - 1)
        row = torch.arange(len(theta), device=theta.device).unsqueeze(1)
        return Predictors(
            torch.where(missing, theta.unsqueeze(1), state["snapshots"][row, place]),
            torch.where(missing, buffers.unsqueeze(1), state["snapshot_buffers"][row, place]),
        )
