"""Norms of J models on a folded batch: each visit with statistics and weights of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from . import dispatch
from .fusion import Fated, Fusion, Watch
from .stacked_params import StackedParam

_MOST = 4096  # channels of a group that a kernel's program can hold


class NotStackable(Exception):  # noqa: N818 (a finding, not a fault)
    """The module does something with its parameters that only `vmap` can batch."""


class FoldedNorms(Fated):
    """The part of `Folded` that knows norms.

    Args:
        key, pieces, fates, watch: as there.
    """

    def __init__(
        self,
        key: Tensor,
        pieces: Mapping[int, StackedParam],
        fates: Sequence[Fusion],
        watch: Watch | None,
    ) -> None:
        super().__init__(key, fates, watch)
        self.visits, self.pieces = len(key), pieces
        # new running statistics, by the identity of the old
        self.statistics: dict[int, Tensor] = {}

    def _affine(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Images [J * B, C, ...] times and plus [J, C]."""
        spread = (self.visits, -1, x.shape[1], *(1,) * (x.dim() - 2))
        split = x.reshape(self.visits, -1, *x.shape[1:])
        if weight is not None:
            split = split * weight.reshape(spread).to(x.dtype)
        if bias is not None:
            split = split + bias.reshape(spread).to(x.dtype)
        return split.reshape(x.shape)

    def batch_norm(
        self,
        x: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """As F.batch_norm, each visit with the statistics of its own batch and running statistics
        [J, C].
        """
        count = x.numel() // (self.visits * x.shape[1])
        if training and count < 2:
            raise InputError(
                "BatchNorm needs more than one value a channel in training; raise the batch size."
            )
        if not training and (mean is None or variance is None):
            raise NotStackable("BatchNorm without statistics in evaluation")

        def done(relu: bool, more: Tensor | None) -> Tensor:
            if training and weight is not None and bias is not None and dispatch.quick(x):
                return self._quick_batch_norm(
                    x, mean, variance, weight, bias, momentum, eps, relu, more
                )
            out, centre, var = self._normalised(
                x, None if training else mean, variance, weight, bias, eps
            )
            if training and mean is not None and variance is not None:
                unbiased = var * count / (count - 1)
                for kept, new in ((mean, centre), (variance, unbiased)):
                    moved = (1 - momentum) * self._latest(kept) + momentum * new.detach().reshape(
                        kept.shape
                    )
                    self.statistics[id(kept)] = moved
            return _finished(out, relu, more)

        return self.normed(x, done)

    def group_norm(
        self,
        x: Tensor,
        groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """As F.group_norm with weights [J, C]."""

        def done(relu: bool, more: Tensor | None) -> Tensor:
            suited = (
                dispatch.quick(x) and x.shape[1] % groups == 0 and x.shape[1] // groups <= _MOST
            )
            if weight is not None and bias is not None and suited:
                from ..kernels.triton.group_norm import GroupNorm

                return self._quick_norm(x, weight, bias, GroupNorm(groups, eps), relu, more)[0]
            return _finished(
                self._affine(F.group_norm(x, groups, None, None, eps), weight, bias), relu, more
            )

        return self.normed(x, done)

    def instance_norm(
        self,
        x: Tensor,
        mean: Tensor | None = None,
        variance: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """As F.instance_norm with weights [J, C], without running statistics: a GroupNorm of single
        channels.
        """
        if mean is not None or variance is not None or not use_input_stats:
            raise NotStackable("InstanceNorm with running statistics")
        return self.group_norm(x, x.shape[1], weight, bias, eps)

    def _latest(self, kept: Tensor) -> Tensor:
        """Running statistics as they are now: a layer may be used twice."""
        return self.statistics.get(id(kept), kept)

    def _quick_batch_norm(
        self,
        x: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        momentum: float,
        eps: float,
        relu: bool,
        more: Tensor | None,
    ) -> Tensor:
        from ..kernels.triton.batch_norm import BatchNorm

        moving = (
            torch.zeros_like(weight) if kept is None else self._latest(kept)
            for kept in (mean, variance)
        )
        kind = BatchNorm(next(moving), next(moving), eps, momentum)
        out, known = self._quick_norm(x, weight, bias, kind, relu, more)
        if mean is not None and variance is not None:
            self.statistics[id(mean)], self.statistics[id(variance)] = known[4], known[5]
        return out

    def _quick_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, kind: Any, relu: bool, more: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Normalised images by Triton kernels, and the numbers they were made with; for the kind
        see `StackedNorm`.
        """
        from ..kernels.triton.norm import StackedNorm

        pieces = self.pieces.get(id(weight)), self.pieces.get(id(bias))
        alike = more is None or (more.shape == x.shape and more.dtype == x.dtype)
        out, known = StackedNorm.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, kind, relu and alike, pieces, more if alike else None
        )
        return out if more is None or alike else F.relu(out + more), known

    def _normalised(
        self,
        x: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised by given statistics [J, C], or by those of the batch where `mean` is None; and
        the statistics.
        """
        wide = x.reshape(self.visits, -1, *x.shape[1:]).to(
            weight.dtype if weight is not None else x.dtype
        )
        spread = (self.visits, 1, x.shape[1], *(1,) * (x.dim() - 2))
        if mean is None or variance is None:
            var, centre = torch.var_mean(
                wide, dim=(1, *range(3, wide.dim())), correction=0, keepdim=True
            )
        else:
            var, centre = variance.reshape(spread), mean.reshape(spread)
        scale = torch.rsqrt(var + eps)
        if weight is not None:
            scale = scale * weight.reshape(spread)
        shift = -centre * scale if bias is None else bias.reshape(spread) - centre * scale
        return (wide * scale + shift).to(x.dtype).reshape(x.shape), centre, var

    def layer_norm(
        self,
        x: Tensor,
        shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """As F.layer_norm with weights [J, *shape]."""
        out = F.layer_norm(x, shape, None, None, eps)
        split = out.reshape(self.visits, -1, *shape)
        if weight is not None:
            split = split * weight.unsqueeze(1).to(x.dtype)
        if bias is not None:
            split = split + bias.unsqueeze(1).to(x.dtype)
        return split.reshape(x.shape)

    def rms_norm(
        self, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        """As F.rms_norm with weights [J, *shape]."""
        if eps is None:  # that of the weights' type, which bf16 products have left
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        out = F.rms_norm(x, shape, None, eps)
        if weight is None:
            return out
        return (out.reshape(self.visits, -1, *shape) * weight.unsqueeze(1).to(x.dtype)).reshape(
            x.shape
        )


def _finished(out: Tensor, relu: bool, more: Tensor | None) -> Tensor:
    """A norm's output with what comes after it, on a GPU in the order in memory that kernels give
    it.

    For a module may ask for a view that another order does not allow: a trial in float64 is to find
    that.
    """
    out = out if more is None else out + more
    out = F.relu(out) if relu else out
    return out.movedim(1, -1).contiguous().movedim(-1, 1) if out.is_cuda else out
