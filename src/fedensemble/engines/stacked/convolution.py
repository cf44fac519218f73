"""Convolutions and max-pooling of J models on a folded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ..kernels.cpu_conv import Pair, extent
from ..kernels.cpu_max_pool import MaxPool2d, convolve_and_pool
from . import dispatch
from .aligned_rows import HAS_TRITON
from .fusion import OTHER_WAYS, Fusion, Watch
from .normalization import FoldedNorms, NotStackable
from .stacked_params import StackedParam


class FoldedConvolutions(FoldedNorms):
    """The part of `Folded` that knows convolutions.

    Args:
        key, pieces, compute, fates, watch: as there.
    """

    def __init__(
        self,
        key: Tensor,
        pieces: Mapping[int, StackedParam],
        compute: torch.dtype,
        fates: Sequence[Fusion],
        watch: Watch | None,
    ) -> None:
        super().__init__(key, pieces, fates, watch)
        self.compute = compute

    def max_pool2d(
        self,
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        """As F.max_pool2d, which needs no weights but was slow, on a GPU in its backward pass, on a
        CPU before it.
        """
        (size, wide), (step, beside) = _pair(kernel_size), _pair(stride or kernel_size)
        simple = (
            size == wide
            and step == beside
            and step >= size
            and _pair(padding) == (0, 0)
            and x.dim() == 4
        )
        simple = simple and not (ceil_mode or return_indices) and _pair(dilation) == (1, 1)
        simple = simple and size <= min(x.shape[-2:])
        if id(x) in self.pooling:
            if not (simple and size == step):
                raise InputError(OTHER_WAYS)
            return self.pooling.pop(id(x))[1](size)
        if self.watch is not None and simple and size == step:
            self.watch.pooled(x)
        if HAS_TRITON and x.is_cuda and simple:
            from ..kernels.triton.max_pool import TritonMaxPool2d

            return TritonMaxPool2d.apply(x, size, step)  # type: ignore[no-untyped-call]
        if simple and not x.is_cuda and size == step:
            return MaxPool2d.apply(x, size)  # type: ignore[no-untyped-call]
        usual: Any = F.max_pool2d
        return usual(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)

    def conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        """As F.conv1d with weights [J, O, C / groups, w]: images of one row."""
        if weight.dim() != 4 or x.dim() != 3:
            raise NotStackable("a convolution without a batch")
        stride, dilation = (1, _last(stride)), (1, _last(dilation))
        padding = padding if isinstance(padding, str) else (0, _last(padding))
        x, weight = x.unsqueeze(2), weight.unsqueeze(3)
        return dispatch.conv2d(
            *self._to_convolve(x, weight, bias, stride, padding, dilation, groups)
        ).squeeze(2)

    def conv2d(
        self,
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
        given = self._to_convolve(x, weight, bias, stride, padding, dilation, groups)
        before = _version(given[0])

        def done(size: int | None) -> Tensor:
            if size is None:
                return dispatch.conv2d(*given, self.pieces.get(id(weight)))
            if _version(given[0]) != before:  # written into since
                raise InputError(OTHER_WAYS)
            return convolve_and_pool(*given, size)

        def like() -> Tensor:
            shape = (len(x), weight.shape[1], *extent(given[0], weight, *given[3:6]))
            return x.new_full((), torch.nan).expand(shape)

        return done(None) if x.is_cuda else self.convolved(like, done)

    def _to_convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
    ) -> tuple[Tensor, Tensor, Tensor | None, Pair, Pair, Pair, int]:
        """The same with images in the type of products, and pairs of numbers; one-sided padding is
        in the images.
        """
        if padding == "same":
            around = [
                apart * (size - 1)
                for apart, size in zip(_pair(dilation), weight.shape[3:], strict=True)
            ]
            x = F.pad(x, (0, around[1] % 2, 0, around[0] % 2)) if any(a % 2 for a in around) else x
            padding = (around[0] // 2, around[1] // 2)
        padding = _pair(0 if padding == "valid" else padding)
        return x.to(self.compute), weight, bias, _pair(stride), padding, _pair(dilation), groups


def _version(x: Tensor) -> int:
    """How often it was written into, as far as torch counts."""
    return 0 if x.is_inference() else x._version


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _last(value: Any) -> int:
    return value if isinstance(value, int) else int(value[-1])
