"""3-D and transposed convolutions with stacked parameters: one convolution with J times the groups.

The images of the visits become channels [B, J * C, ...], and group j holds the filters of visit j.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import NotStackable
from .handlers import handles

if TYPE_CHECKING:
    from .forward import StackedForward


def _join(forward: StackedForward, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """Images [B, J * C, ...], filters and biases of all visits as those of one convolution."""
    if x.dim() != weight.dim() - 1 or x.dim() < 3:
        raise NotStackable("a convolution without a batch")
    wide = forward.split(x.to(forward.compute)).transpose(0, 1).flatten(1, 2)
    filters = weight.to(forward.compute).flatten(0, 1)
    return wide, filters, None if bias is None else bias.to(forward.compute).flatten()


def _separate(forward: StackedForward, out: Tensor) -> Tensor:
    """Outputs [B, J * O, ...] as one batch, [J * B, O, ...]."""
    return torch.unflatten(out, 1, (forward.visits, -1)).transpose(0, 1).flatten(0, 1)


@handles(F.conv3d, layer=True)
def conv3d(
    forward: StackedForward,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """As F.conv3d with weights [J, O, C / groups, d, h, w]."""
    wide, filters, biases = _join(forward, x, weight, bias)
    groups *= forward.visits
    return _separate(forward, F.conv3d(wide, filters, biases, stride, padding, dilation, groups))


def _register_transposed(function: Any) -> None:
    @handles(function, layer=True)
    def conv_transpose(
        forward: StackedForward,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        """As `function` with weights [J, C, O / groups, ...]."""
        wide, filters, biases = _join(forward, x, weight, bias)
        groups *= forward.visits
        out = function(wide, filters, biases, stride, padding, output_padding, groups, dilation)
        return _separate(forward, out)


for _function in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d):
    _register_transposed(_function)
