"""A multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from .argument_checks import check_dropout, check_widths
from .registry import models


@models.register("mlp")
class MLP(nn.Module):
    """Fully connected layers with ReLU between them; inputs of any shape are flattened.

    Args:
        shape: shape of one input.
        outputs: number of classes or targets.
        hidden: widths of the hidden layers; an empty list makes a linear model.
        dropout: probability of dropout after each hidden layer.
    """

    def __init__(
        self,
        shape: Sequence[int],
        outputs: int,
        hidden: Sequence[int] = (64,),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_dropout("mlp", dropout)
        widths = [prod(shape), *check_widths("mlp", "hidden", hidden)]
        layers: list[nn.Module] = [nn.Flatten()]
        for in_features, out_features in pairwise(widths):
            layers += [nn.Linear(in_features, out_features), nn.ReLU()]
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]
