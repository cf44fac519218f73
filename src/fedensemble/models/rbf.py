"""The paper's toy model: linear in fixed radial basis features.

f(x) = sum_j w_j exp(-(x - nu_j)^2 / (2 b^2)), nu_j drawn once and the same for all modes, only w is
learned.
"""

import torch
from torch import Tensor, nn

from .. import prng
from .argument_checks import check_positive, check_widths
from .registry import models


@models.register("rbf")
class RBFLinear(nn.Module):
    """A linear model on radial basis features of one input, [B, 1] -> [B, 1].

    Args:
        features: number of centres.
        width: b.
        low, high: the interval the centres are drawn from.
        scale: standard deviation of the initial weights.
        centres_seed: of the centres, so that every mode has the same ones.

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
        drawn = prng.uniform(prng.key(centres_seed, "rbf centres"), features)
        self.register_buffer("centres", (low + (high - low) * drawn).float(), persistent=False)
        self.width = width
        self.weight = nn.Parameter(scale * torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        phi = torch.exp(-((x - self.centres) ** 2) / (2 * self.width**2))
        return phi @ self.weight.unsqueeze(-1)
