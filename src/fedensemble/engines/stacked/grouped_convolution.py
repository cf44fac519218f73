"""3-D and transposed convolutions with stacked parameters: one convolution with J times the groups.

The images of the visits become channels [B, J * C, ...], and group j holds the filters of visit j.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
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
    steps = _spread(stride, 3), _spread(dilation, 3)
    plain = groups == 1 and not isinstance(padding, str) and steps[1][1:] == (1, 1)
    if plain and weight.dim() == 6 and x.dim() == 5 and dispatch.triton_supported(x):
        x = x.to(forward.compute)
        return _conv3d_by_slices(x, weight, bias, steps[0], _spread(padding, 3), steps[1][0])
    wide, filters, biases = _join(forward, x, weight, bias)
    groups *= forward.visits
    return _separate(forward, F.conv3d(wide, filters, biases, stride, padding, dilation, groups))


def _conv3d_by_slices(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: int,
) -> Tensor:
    """A 3-D convolution as one of images, whose channels are those of all slices of a filter.

    This needs no kernel of its own, for as many copies of the input as a filter has slices.
    """
    slices = weight.shape[3]
    x = F.pad(x, (0, 0, 0, 0, padding[0], padding[0]))
    depth = (x.shape[2] - dilation * (slices - 1) - 1) // stride[0] + 1
    parts = [
        x[:, :, at : at + (depth - 1) * stride[0] + 1 : stride[0]]
        for at in range(0, dilation * slices, dilation)
    ]
    images = torch.stack(parts, 2).flatten(1, 2).transpose(1, 2).flatten(0, 1)
    out = dispatch.conv2d(
        images,
        weight.flatten(2, 3),
        bias,
        (stride[1], stride[2]),
        (padding[1], padding[2]),
        (1, 1),
        1,
    )
    return torch.unflatten(out, 0, (-1, depth)).transpose(1, 2)


def _register_transposed(function: Any, dims: int) -> None:
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
        plain = groups == 1 and set(_spread(dilation, dims)) == {1} and dims < 3
        if plain and x.dim() == weight.dim() - 1 == dims + 2 and dispatch.triton_supported(x):
            steps = [_spread(value, dims) for value in (stride, padding, output_padding)]
            return _triton_conv_transpose(forward, x, weight, bias, *steps)
        wide, filters, biases = _join(forward, x, weight, bias)
        groups *= forward.visits
        out = function(wide, filters, biases, stride, padding, output_padding, groups, dilation)
        return _separate(forward, out)


def _triton_conv_transpose(
    forward: StackedForward,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
) -> Tensor:
    """Transposed convolutions of images, or of sequences as images of one row."""
    from ..kernels.triton.conv_transpose import TritonConvTranspose

    x, param = x.to(forward.compute), forward.params.get(id(weight))
    if x.dim() == 3:
        x, weight, param = x.unsqueeze(2), weight.unsqueeze(3), None
        stride, padding, output_padding = (1, *stride), (0, *padding), (0, *output_padding)
        steps = (stride, padding, output_padding)
        return TritonConvTranspose.apply(x, weight, bias, *steps, param).squeeze(2)  # type: ignore[no-any-return, no-untyped-call]
    return TritonConvTranspose.apply(x, weight, bias, stride, padding, output_padding, param)  # type: ignore[no-any-return, no-untyped-call]


def _spread(value: Any, dims: int) -> tuple[int, ...]:
    """One number for each dimension."""
    return (value,) * dims if isinstance(value, int) else (*value,) * (dims // len(value))


for _dims, _function in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)):
    _register_transposed(_function, _dims + 1)
