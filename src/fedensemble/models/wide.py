"""A ReLU network in NTK parametrisation, whose tangent kernel has a limit as its width grows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod, sqrt

import torch
from torch import Tensor, nn

from ..errors import InputError
from .argument_checks import check_positive, check_widths
from .registry import models


class ScaledLinear(nn.Module):
    """A linear layer with standard normal parameters and fixed scales in the forward pass.

    y = weight_scale / sqrt(in_features) W x + bias_scale b. One learning rate then suits all
    widths, because a step changes the output by the same amount, however wide the layer is.
    """

    def __init__(
        self, in_features: int, out_features: int, weight_scale: float, bias_scale: float
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.bias = nn.Parameter(torch.randn(out_features)) if bias_scale > 0 else None
        self.weight_factor, self.bias_factor = weight_scale / sqrt(in_features), bias_scale

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return nn.functional.linear(self.weight_factor * x, self.weight)
        # Activations are scaled instead of parameters: engine `vector` stacks a layer only if its
        # parameters go into the matmul as they are.
        inner = (self.weight_factor / self.bias_factor) * x
        return self.bias_factor * nn.functional.linear(inner, self.weight, self.bias)


@models.register("wide")
class Wide(nn.Module):
    """A ReLU network in NTK parametrisation; inputs of any shape are flattened.

    All parameters are drawn from N(0, 1), and each layer computes
    weight_scale / sqrt(inputs) W x + bias_scale b. As the width grows, the outputs at the start
    become a Gaussian process, and the tangent kernel converges to a fixed one
    (`theory.infinite_width.relu_kernels`), as in Jacot, Gabriel, Hongler, "Neural tangent kernel",
    NeurIPS 2018. With this parametrisation `lr` is the eta_0 of the paper's theorems.

    Args:
        shape: shape of one input.
        outputs: number of classes or targets.
        width: units of each hidden layer.
        depth: number of hidden layers.
        weight_scale: standard deviation of the weights times the square root of the inputs of
            their layer; sqrt(2) keeps the size of activations through ReLU layers.
        bias_scale: standard deviation of the biases; 0 leaves them out.

    >>> Wide([2], 1, width=8)(torch.zeros(3, 2)).shape
    torch.Size([3, 1])
    """

    def __init__(
        self,
        shape: Sequence[int],
        outputs: int,
        width: int = 1024,
        depth: int = 1,
        weight_scale: float = sqrt(2),
        bias_scale: float = 0.1,
    ) -> None:
        super().__init__()
        check_widths("wide", "width", [width])
        check_widths("wide", "depth", [depth])
        check_positive("wide", weight_scale=weight_scale)
        if bias_scale != 0:
            check_positive("wide", bias_scale=bias_scale)
        if depth > _MOST_LAYERS:
            raise InputError(f"Model 'wide' needs depth <= {_MOST_LAYERS}; got {depth}.")
        sizes = [prod(shape), *[width] * depth, outputs]
        layers: list[nn.Module] = [nn.Flatten()]
        for in_features, out_features in pairwise(sizes):
            layers += [ScaledLinear(in_features, out_features, weight_scale, bias_scale), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


_MOST_LAYERS = 1000
