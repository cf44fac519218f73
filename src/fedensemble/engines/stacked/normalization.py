"""BatchNorm, GroupNorm, InstanceNorm, LayerNorm and RMSNorm with stacked parameters.

Each visit is normalized with statistics of its own examples, and has running statistics of its own.
BatchNorm, GroupNorm and InstanceNorm can be fused with what follows them, see `fusion.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from . import dispatch
from .errors import NotStackable
from .handlers import handles

if TYPE_CHECKING:
    from .forward import StackedForward

# What one program of the Triton kernels can hold: channels of a group, numbers of a LayerNorm.
_MAX_GROUP = _MAX_LAYER_NORM = 4096


@handles(F.batch_norm)
def batch_norm(
    forward: StackedForward,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As F.batch_norm with weights and running statistics [J, C]."""
    count = x.numel() // (forward.visits * x.shape[1])
    if training and count < 2:
        raise InputError(
            "BatchNorm needs more than one value per channel in training; raise the batch size."
        )
    if not training and (running_mean is None or running_var is None):
        raise NotStackable("BatchNorm without statistics in evaluation")

    def norm(relu: bool, summand: Tensor | None) -> Tensor:
        triton = training and dispatch.triton_supported(x)
        if triton and weight is not None and bias is not None:
            return _triton_batch_norm(
                forward, x, running_mean, running_var, weight, bias, momentum, eps, relu, summand
            )
        fixed = None if training else running_mean
        out, mean, var = _normalize(forward, x, fixed, running_var, weight, bias, eps)
        if training and running_mean is not None and running_var is not None:
            _update_statistics(forward, running_mean, mean, momentum)
            _update_statistics(forward, running_var, var * count / (count - 1), momentum)
        return _add_epilogue(out, relu, summand)

    return _run_norm(forward, x, norm)


@handles(F.group_norm, layer=True)
def group_norm(
    forward: StackedForward,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """As F.group_norm with weights [J, C]."""

    def norm(relu: bool, summand: Tensor | None) -> Tensor:
        fits = x.shape[1] % num_groups == 0 and x.shape[1] // num_groups <= _MAX_GROUP
        if weight is not None and bias is not None and dispatch.triton_supported(x) and fits:
            from ..kernels.triton.group_norm import GroupNorm

            kind = GroupNorm(num_groups, eps)
            return _triton_norm(forward, x, weight, bias, kind, relu, summand)[0]
        out = F.group_norm(x, num_groups, None, None, eps)
        return _add_epilogue(_scale_and_shift(forward, out, weight, bias), relu, summand)

    return _run_norm(forward, x, norm)


@handles(F.instance_norm, layer=True)
def instance_norm(
    forward: StackedForward,
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As F.instance_norm without running statistics: a GroupNorm with one channel per group."""
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise NotStackable("InstanceNorm with running statistics")
    return group_norm(forward, x, x.shape[1], weight, bias, eps)


@handles(F.layer_norm, layer=True)
def layer_norm(
    forward: StackedForward,
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """As F.layer_norm with weights [J, *normalized_shape]."""
    if weight is not None and _fits_layer_norm(x, normalized_shape):
        return _triton_layer_norm(forward, x, weight, bias, eps, centered=True)
    out = F.layer_norm(x, normalized_shape, None, None, eps)
    split = out.reshape(forward.visits, -1, *normalized_shape)
    if weight is not None:
        split = split * weight.unsqueeze(1).to(x.dtype)
    if bias is not None:
        split = split + bias.unsqueeze(1).to(x.dtype)
    return split.reshape(x.shape)


@handles(F.rms_norm, layer=True)
def rms_norm(
    forward: StackedForward,
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """As F.rms_norm with weights [J, *normalized_shape]."""
    if eps is None:  # torch's default belongs to the parameters' dtype, not to that of bf16 matmuls
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    if weight is not None and _fits_layer_norm(x, normalized_shape):
        return _triton_layer_norm(forward, x, weight, None, eps, centered=False)
    out = F.rms_norm(x, normalized_shape, None, eps)
    if weight is None:
        return out
    split = out.reshape(forward.visits, -1, *normalized_shape)
    return (split * weight.unsqueeze(1).to(x.dtype)).reshape(x.shape)


def _fits_layer_norm(x: Tensor, normalized_shape: Any) -> bool:
    return dispatch.triton_supported(x) and torch.Size(normalized_shape).numel() <= _MAX_LAYER_NORM


def _triton_layer_norm(
    forward: StackedForward,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
) -> Tensor:
    from ..kernels.triton.layer_norm import StackedLayerNorm

    params = forward.params.get(id(weight)), forward.params.get(id(bias))
    rows = x.reshape(forward.visits, -1, weight[0].numel())
    flat = weight.flatten(1), None if bias is None else bias.flatten(1)
    out: Tensor = StackedLayerNorm.apply(rows, *flat, eps, centered, params)  # type: ignore[no-untyped-call]
    return out.reshape(x.shape)


def _run_norm(forward: StackedForward, x: Tensor, norm: Any) -> Tensor:
    out = forward.fused.run_norm(x, norm)
    if forward.tracer is not None:
        forward.tracer.record_norm(out)
    return out


def _scale_and_shift(
    forward: StackedForward, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Activations [J * B, C, ...] times weights [J, C] plus biases [J, C]."""
    shape = (forward.visits, -1, x.shape[1], *(1,) * (x.dim() - 2))
    split = forward.split(x)
    if weight is not None:
        split = split * weight.reshape(shape).to(x.dtype)
    if bias is not None:
        split = split + bias.reshape(shape).to(x.dtype)
    return split.reshape(x.shape)


def _normalize(
    forward: StackedForward,
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalized activations, and the mean and variance they were normalized with.

    Args:
        mean, var: statistics [J, C]; those of each visit's batch are used if `mean` is None.
    """
    wide = forward.split(x).to(weight.dtype if weight is not None else x.dtype)
    shape = (forward.visits, 1, x.shape[1], *(1,) * (x.dim() - 2))
    if mean is None or var is None:
        axes = (1, *range(3, wide.dim()))
        var, mean = torch.var_mean(wide, dim=axes, correction=0, keepdim=True)
    else:
        var, mean = var.reshape(shape), mean.reshape(shape)
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight.reshape(shape)
    shift = -mean * scale if bias is None else bias.reshape(shape) - mean * scale
    return (wide * scale + shift).to(x.dtype).reshape(x.shape), mean, var


def _current(forward: StackedForward, statistic: Tensor) -> Tensor:
    """A running statistic as it is now: a layer may run twice in one pass."""
    return forward.statistics.get(id(statistic), statistic)


def _update_statistics(
    forward: StackedForward, statistic: Tensor, batch: Tensor, momentum: float
) -> None:
    old = (1 - momentum) * _current(forward, statistic)
    forward.statistics[id(statistic)] = old + momentum * batch.detach().reshape(statistic.shape)


def _triton_batch_norm(
    forward: StackedForward,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    momentum: float,
    eps: float,
    relu: bool,
    summand: Tensor | None,
) -> Tensor:
    from ..kernels.triton.batch_norm import BatchNorm

    mean, var = (
        torch.zeros_like(weight) if statistic is None else _current(forward, statistic)
        for statistic in (running_mean, running_var)
    )
    kind = BatchNorm(mean, var, eps, momentum)
    out, statistics = _triton_norm(forward, x, weight, bias, kind, relu, summand)
    if running_mean is not None and running_var is not None:
        forward.statistics[id(running_mean)] = statistics[4]
        forward.statistics[id(running_var)] = statistics[5]
    return out


def _triton_norm(
    forward: StackedForward,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    kind: Any,
    relu: bool,
    summand: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output and statistics of the Triton kernels; for `kind` see `StackedNorm`."""
    from ..kernels.triton.norm import StackedNorm

    params = forward.params.get(id(weight)), forward.params.get(id(bias))
    fusable = summand is None or (summand.shape == x.shape and summand.dtype == x.dtype)
    out, statistics = StackedNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, kind, relu and fusable, params, summand if fusable else None
    )
    return out if summand is None or fusable else F.relu(out + summand), statistics


def _add_epilogue(out: Tensor, relu: bool, summand: Tensor | None) -> Tensor:
    """A norm's output with its fused addition and ReLU.

    On a GPU the memory format is channels last, as the Triton kernels return it. A module may ask
    for a view that only another memory format allows; the check in float64, which runs without the
    kernels, must fail there as training would.
    """
    out = out if summand is None else out + summand
    out = F.relu(out) if relu else out
    return out.movedim(1, -1).contiguous().movedim(-1, 1) if out.is_cuda else out
