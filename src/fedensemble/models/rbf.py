"""The paper's toy model: a linear model of fixed radial basis features.

f(x) = sum_j w_j exp(-(x - nu_j)^2 / (2 b^2)). The centers nu_j are drawn once and are the same for
all modes; only w is trained.
"""

import torch
from torch import Tensor, nn

from .. import prng
from .argument_checks import check_positive, check_widths
from .registry import models


@models.register("rbf")
class RBFLinear(nn.Module):
    """A linear model of radial basis features of one input, [B, 1] -> [B, 1].

    Args:
        features: number of centers.
        width: width b of the basis functions.
        low, high: interval from which the centers are drawn.
        scale: standard deviation of the initial weights.
        centres_seed: seed of the centers, so that all modes have the same centers.

    >>> RBFLinear()(torch.zeros(3, 1)).shape
    torch.Size([3, 1])
    """

    centres: Tensor

    def __init__(
        self,
        features: int = 100,
        width: float = 0.08,
        low: float = -1.0,
        high: float = 1.0,
        scale: float = 1.0,
        centres_seed: int = 0,
    ) -> None:
        super().__init__()
        check_widths("rbf", "features", [features])
        check_positive("rbf", width=width)
        uniform = prng.uniform(prng.key(centres_seed, "rbf centres"), features)
        self.register_buffer("centres", (low + (high - low) * uniform).float(), persistent=False)
        self.width = width
        # In place: a product would load torch's compiler when the size of the model is checked.
        self.weight = nn.Parameter(torch.randn(features).mul_(scale))

    def forward(self, x: Tensor) -> Tensor:
        phi = torch.exp(-((x - self.centres) ** 2) / (2 * self.width**2))  # [B, features]
        return phi @ self.weight.unsqueeze(-1)
