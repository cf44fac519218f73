"""Centered clipping: a client can move a mode only so far.

v <- v + mean_i (x_i - v) min(1, tau / ||x_i - v||), from v = what was broadcast.

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
    """The mean of changes that are shortened to a radius, of every tensor by itself.

    The centre is the mode as it was broadcast. Malicious clients still move the mode, each by the
    radius at most. A mode with a single client is protected only by a `tau` of your own.

    Args:
        tau: the radius; None takes the median length of the mode's changes, which any minority
            leaves plausible.
        iterations: how often the mean becomes the new centre.
        weighted: whether clients count by their weight; it is what they claim to have.
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
        centre = torch.zeros_like(change[0])
        length = torch.linalg.vector_norm(change, dim=1)
        radius = length.median() if self.tau is None else length.new_tensor(self.tau)
        for _ in range(self.iterations):
            away = change - centre
            length = torch.linalg.vector_norm(away, dim=1)
            factor = torch.where(length > radius, radius / length, torch.ones_like(length))
            centre = centre + (share * factor) @ away
        return centre
