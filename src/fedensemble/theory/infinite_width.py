"""Closed forms of the kernels of infinitely wide ReLU networks.

For inputs of dimension d and layers weight_scale / sqrt(inputs) W x + bias_scale b with standard
normal parameters (model `wide`), with s = weight_scale^2 and c = bias_scale^2:

    K_1(x, x') = s <x, x'> / d + c,                                Theta_1 = K_1,
    K_{l+1}(x, x') = s sqrt(K_l(x, x) K_l(x', x')) (sin a + (pi - a) cos a) / (2 pi) + c,
    Theta_{l+1}(x, x') = K_{l+1}(x, x') + s (pi - a) / (2 pi) Theta_l(x, x'),

where cos a = K_l(x, x') / sqrt(K_l(x, x) K_l(x', x')). K is the covariance of the outputs at the
start (the NNGP, the paper's script K), Theta the neural tangent kernel.

References: Cho, Saul, "Kernel methods for deep learning", NeurIPS 2009; Jacot, Gabriel, Hongler,
"Neural tangent kernel", NeurIPS 2018; Lee et al., "Wide neural networks of any depth evolve as
linear models under gradient descent", NeurIPS 2019.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError


class Kernels(NamedTuple):
    """The two kernels of infinitely wide networks, [B1, B2] each."""

    nngp: Tensor  # covariance of an output at the start
    ntk: Tensor  # of one output; different outputs do not interact


def relu_kernels(
    x: Tensor,
    x2: Tensor | None = None,
    *,
    depth: int = 1,
    weight_scale: float = sqrt(2),
    bias_scale: float = 0.1,
) -> Kernels:
    """The kernels of an infinitely wide `wide` network, in float64.

    Args:
        x, x2: inputs [B1, ...] and [B2, ...], flattened like the model's; x2 is x by default.
        depth: number of hidden layers; 0 is a linear model.
        weight_scale, bias_scale: as in model `wide`.

    >>> relu_kernels(torch.eye(2), depth=1, bias_scale=0.0).nngp
    tensor([[1.0000, 0.3183],
            [0.3183, 1.0000]], dtype=torch.float64)
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise InputError(f"relu_kernels() needs an integer depth >= 0; got {depth!r}.")
    left = x.reshape(len(x), -1).double()
    right = left if x2 is None else x2.reshape(len(x2), -1).double()
    if left.shape[1] != right.shape[1]:
        raise InputError(
            f"relu_kernels() needs inputs of one size; got {left.shape[1]} and {right.shape[1]}."
        )
    scale, shift = weight_scale**2, bias_scale**2

    def first(a: Tensor, b: Tensor) -> Tensor:
        return scale * (a * b).sum(-1) / left.shape[1] + shift

    nngp = first(left[:, None], right[None])
    ntk = nngp
    left_size, right_size = first(left, left), first(right, right)  # K(x, x) of each layer
    for _ in range(depth):
        size = torch.sqrt(left_size[:, None] * right_size[None])
        cosine = (nngp / size).clamp(-1, 1)
        angle = torch.arccos(cosine)
        active = (pi - angle) / (2 * pi)  # probability that both units are active
        nngp = scale * size * (torch.sin(angle) / (2 * pi) + active * cosine) + shift
        ntk = nngp + scale * active * ntk
        left_size, right_size = (scale * s / 2 + shift for s in (left_size, right_size))
    return Kernels(nngp, ntk)
