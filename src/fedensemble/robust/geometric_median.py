"""The geometric median, by smoothed Weiszfeld iterations.

Reference: Pillutla, Kakade, Harchaoui, "Robust aggregation for federated learning", IEEE
Transactions on Signal Processing 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.aggregator import Aggregator, aggregators
from ..flat_params import Tree
from .coordinate_wise import trimmed_mean
from .options import check_count, check_positive


@aggregators.register("geometric-median")
@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Aggregator):
    """The point with the smallest sum of distances to the changes, of each tensor separately.

    Tolerates any minority of a mode's clients, or of their weight if `weighted`.

    Args:
        iterations: Weiszfeld steps, starting from the coordinate-wise median.
        nu: lower bound of distances, which keeps the steps finite.
        weighted: whether clients count by their weight, which is what they claim to have.
    """

    iterations: int = 10
    nu: float = 1e-6
    weighted: bool = False

    def __post_init__(self) -> None:
        check_count(self, "iterations")
        check_positive(self, "nu")

    def combine(self, changes: Tree, weight: Tensor) -> Tree:
        alpha = weight if self.weighted else torch.ones_like(weight)
        return {
            name: self.find_median(change, alpha.to(change.dtype))
            for name, change in changes.items()
        }

    def find_median(self, change: Tensor, alpha: Tensor) -> Tensor:
        """The geometric median of [n, P] with weights [n]."""
        # The start is not zero. A client that uploads no change lies at zero, and Weiszfeld steps
        # that start at a client's change stay there.
        point = trimmed_mean(change, (len(change) - 1) // 2)
        for _ in range(self.iterations):
            beta = alpha / torch.linalg.vector_norm(change - point, dim=1).clamp(min=self.nu)
            point = (beta / beta.sum()) @ change
        return point
