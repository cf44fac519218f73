"""Centered clipping: limits how far each client can move a mode.

v <- v + mean_i (x_i - v) min(1, tau / ||x_i - v||), starting at v = what was broadcast.

Reference: Karimireddy, He, Jaggi, "Learning from history for Byzantine robust optimization", ICML
2021.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.aggregator import Aggregator, aggregators
from ..flat_params import Tree
from .options import check_count, check_positive


@aggregators.register("centered-clipping")
@dataclass(frozen=True, kw_only=True)
class CenteredClipping(Aggregator):
    """The mean of the changes, clipped to a radius, of each tensor separately.

    The center is the mode as it was broadcast. A malicious client can still move the mode, but at
    most by the radius. A mode with a single client is protected only if you set `tau`.

    Args:
        tau: the radius; None uses the median norm of the mode's changes, which a minority of
            clients cannot make implausible.
        iterations: number of iterations; each takes the last mean as the center.
        weighted: whether clients count by their weight, which is what they claim to have.
    """

    tau: float | None = None
    iterations: int = 1
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.tau is not None:
            check_positive(self, "tau")
        check_count(self, "iterations")

    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        share = weight if self.weighted else torch.ones_like(weight)
        share = share / share.sum()
        return {
            name: self.clipped_mean(change, share.to(change.dtype))
            for name, change in changes.items()
        }

    def clipped_mean(self, change: Tensor, share: Tensor) -> Tensor:
        """The update from changes [n, P] with shares [n]."""
        center = torch.zeros_like(change[0])
        norm = torch.linalg.vector_norm(change, dim=1)
        radius = norm.median() if self.tau is None else norm.new_tensor(self.tau)
        for _ in range(self.iterations):
            difference = change - center
            norm = torch.linalg.vector_norm(difference, dim=1)
            factor = torch.where(norm > radius, radius / norm, torch.ones_like(norm))
            center = center + (share * factor) @ difference
        return center
