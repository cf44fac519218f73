"""Handlers of convolution and max-pooling layers with stacked parameters.

The arithmetic and the gradients are in `engines/kernels`: `triton/conv.py` and
`triton/conv_weight_grad.py` on a GPU, `im2col_conv.py` without Triton, `cpu_conv.py` on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from ..kernels.cpu_conv import Pair
from ..kernels.cpu_max_pool import MaxPool2d
from . import dispatch
from .aligned_rows import HAS_TRITON
from .errors import NotStackable
from .handlers import handles

if TYPE_CHECKING:
    from .forward import StackedForward


@handles(F.conv1d, layer=True)
def conv1d(
    forward: StackedForward,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """As F.conv1d with weights [J, O, C / groups, w]: a conv2d over images of one row."""
    if weight.dim() != 4 or x.dim() != 3:
        raise NotStackable("a convolution without a batch")
    stride, dilation = (1, _last(stride)), (1, _last(dilation))
    padding = padding if isinstance(padding, str) else (0, _last(padding))
    x, weight = x.unsqueeze(2), weight.unsqueeze(3)
    x, padding = _pad_same(x, weight, padding, dilation)
    x = x.to(forward.compute)
    return dispatch.conv2d(x, weight, bias, stride, padding, dilation, groups).squeeze(2)


@handles(F.conv2d, layer=True)
def conv2d(
    forward: StackedForward,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """As F.conv2d with weights [J, O, C / groups, h, w]."""
    if weight.dim() != 5 or x.dim() != 4:
        raise NotStackable("a convolution without a batch")
    dilation = _pair(dilation)
    x, padding = _pad_same(x, weight, padding, dilation)
    x, param = x.to(forward.compute), forward.params.get(id(weight))
    return dispatch.conv2d(x, weight, bias, _pair(stride), padding, dilation, groups, param)


@handles(F.max_pool2d, layer=True)
def max_pool2d(
    forward: StackedForward,
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """As F.max_pool2d.

    It has no parameters, but torch's own backward pass is slow on a GPU and its forward pass on a
    CPU, so the common case, square windows that do not overlap, has kernels of its own.
    """
    (size, width), (step, step_width) = _pair(kernel_size), _pair(stride or kernel_size)
    square = size == width and step == step_width and x.dim() == 4 and size <= min(x.shape[-2:])
    plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1)
    common = square and plain and step >= size and not (ceil_mode or return_indices)
    if common and HAS_TRITON and x.is_cuda:
        from ..kernels.triton.max_pool import TritonMaxPool2d

        return TritonMaxPool2d.apply(x, size, step)  # type: ignore[no-untyped-call]
    if common and not x.is_cuda and size == step:
        return MaxPool2d.apply(x, size)  # type: ignore[no-untyped-call]
    torch_pool: Any = F.max_pool2d
    return torch_pool(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def _pad_same(x: Tensor, weight: Tensor, padding: Any, dilation: Pair) -> tuple[Tensor, Pair]:
    """Input and padding as numbers; where "same" padding is one-sided, the input is padded."""
    if padding == "same":
        total = [step * (size - 1) for step, size in zip(dilation, weight.shape[3:], strict=True)]
        if any(pad % 2 for pad in total):
            x = F.pad(x, (0, total[1] % 2, 0, total[0] % 2))
        return x, (total[0] // 2, total[1] // 2)
    return x, _pair(0 if padding == "valid" else padding)


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _last(value: Any) -> int:
    return value if isinstance(value, int) else int(value[-1])
