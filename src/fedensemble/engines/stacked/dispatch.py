"""Chooses the implementation of an operation with stacked parameters, by device and shape."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import prng
from ..kernels.cpu_conv import Pair, conv2d_cpu, grouped_conv, output_pixels
from ..kernels.im2col_conv import Im2ColConv
from .aligned_rows import HAS_TRITON
from .stacked_params import StackedParam


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    param: StackedParam | None = None,
) -> Tensor:
    """Convolves the examples of visit j with the filters of visit j.

    Args:
        x: [J * B, C, H, W].
        weight: [J, O, C / groups, h, w].
        bias: [J, O] or None.
        param: the filters as kernels read them, where they are a parameter.
    """
    plain = groups == 1 and dilation == (1, 1)
    if plain and triton_supported(x) and _output_size(x, weight, stride, padding) < 1 << 31:
        from ..kernels.triton.conv import TritonConvolution

        return TritonConvolution.apply(x, weight, bias, stride, padding, param)  # type: ignore[no-any-return, no-untyped-call]
    if groups > 1 and triton_supported(x) and x.shape[1] == groups == weight.shape[1]:
        from ..kernels.triton.depthwise_conv import TritonDepthwise

        return TritonDepthwise.apply(x, weight, bias, stride, padding, dilation, param)  # type: ignore[no-any-return, no-untyped-call]
    if groups > 1 and triton_supported(x) and dilation == (1, 1):
        return _conv2d_by_group(x, weight, bias, stride, padding, groups)
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if not x.is_cuda:
        return conv2d_cpu(x, weight, bias, stride, padding, dilation, groups)
    if plain:
        out: Tensor = Im2ColConv.apply(x, weight, stride, padding)  # type: ignore[no-untyped-call]
    else:
        out = grouped_conv(x, weight, stride, padding, dilation, groups)
    if bias is None:
        return out
    return out + bias.repeat_interleave(len(x) // len(bias), 0)[:, :, None, None]


def _conv2d_by_group(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, groups: int
) -> Tensor:
    """Each group of channels as a visit of its own: a plain convolution of J * groups visits."""
    visits, batch = len(weight), len(x) // len(weight)
    images = torch.unflatten(torch.unflatten(x, 0, (visits, batch)), 2, (groups, -1))
    images = images.transpose(1, 2).flatten(0, 2)  # [J * G * B, C / G, H, W]
    filters = torch.unflatten(weight, 1, (groups, -1)).flatten(0, 1)
    biases = None if bias is None else torch.unflatten(bias, 1, (groups, -1)).flatten(0, 1)
    out = conv2d(images, filters, biases, stride, padding, (1, 1), 1)
    out = torch.unflatten(out, 0, (visits, groups, batch)).transpose(1, 2)
    return out.flatten(2, 3).flatten(0, 1)


def _output_size(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> int:
    """Elements of a convolution's output for one visit."""
    examples = len(x) // len(weight)
    return examples * weight.shape[1] * output_pixels(x, weight, stride, padding)


def triton_supported(x: Tensor) -> bool:
    """True if the Triton kernels can take these activations."""
    if not (HAS_TRITON and x.is_cuda and x.numel() < 1 << 31):
        return False
    return x.dtype in (torch.float32, torch.bfloat16)


def fold_in(keys: Tensor, word: int | Tensor) -> Tensor:
    """As `prng.fold_in` of keys [J] and one word; one kernel launch on a GPU."""
    if HAS_TRITON and keys.is_cuda:
        from ..kernels.triton.dropout import fold_in as triton_fold_in

        return triton_fold_in(keys, word)
    return torch.as_tensor(prng.fold_in(keys, word))


def dropout_mask(keys: Tensor, size: int, threshold: int) -> Tensor:
    """True where random bits reach the threshold, [J, size], from one key per visit, [J]."""
    if HAS_TRITON and keys.is_cuda:
        from ..kernels.triton.dropout import dropout_mask as triton_mask

        return triton_mask(keys, size, threshold)
    return prng.bits(keys, size) >= threshold
