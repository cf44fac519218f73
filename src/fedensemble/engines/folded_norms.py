"""Norms of J models on a folded batch: each visit with statistics and weights of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.randomness import KeyedRandomness
from ..errors import InputError
from . import kernels
from .pieces import Piece
from .rectified import Watch


class NotFoldable(Exception):  # noqa: N818 (a finding, not a fault)
    """The module does something with its parameters that only `vmap` can batch."""


class FoldedNorms(KeyedRandomness):
    """The part of `Folded` that knows norms.

    Args:
        key, pieces, rectified, watch: as there.
    """

    def __init__(
        self, key: Tensor, pieces: Mapping[int, Piece], rectified: Sequence[bool], watch: Watch | None
    ) -> None:
        super().__init__(key)
        self.visits, self.pieces = len(key), pieces
        self.statistics: dict[int, Tensor] = {}  # new running statistics, by the identity of the old
        self.rectified, self.watch, self.norms = rectified, watch, 0
        self.awaited: dict[int, Tensor] = {}  # images that have had their ReLU before the module asks for it

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
        self, x: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        """As F.batch_norm, each visit with the statistics of its own batch and running statistics [J, C]."""
        count = x.numel() // (self.visits * x.shape[1])
        if training and count < 2:
            raise InputError("BatchNorm needs more than one value a channel in training; raise the batch size.")
        if not training and (mean is None or variance is None):
            raise NotFoldable("BatchNorm without statistics in evaluation")
        fused = self.norms < len(self.rectified) and self.rectified[self.norms]
        if training and weight is not None and bias is not None and kernels.quick(x):
            out = self._quick_norm(x, mean, variance, weight, bias, momentum, eps, fused)
        else:
            out, centre, var = self._normalised(x, None if training else mean, variance, weight, bias, eps)
            if training and mean is not None and variance is not None:
                unbiased = var * count / (count - 1)
                for kept, new in ((mean, centre), (variance, unbiased)):
                    moved = (1 - momentum) * self._latest(kept) + momentum * new.detach().reshape(kept.shape)
                    self.statistics[id(kept)] = moved
            out = F.relu(out) if fused else out
        if fused:
            self.awaited[id(out)] = out
        if self.watch is not None:
            self.watch.made(out)
        self.norms += 1
        return out

    def _latest(self, kept: Tensor) -> Tensor:
        """Running statistics as they are now: a layer may be used twice."""
        return self.statistics.get(id(kept), kept)

    def _quick_norm(
        self, x: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor, bias: Tensor, momentum: float,
        eps: float, relu: bool,
    ) -> Tensor:  # fmt: skip
        from .triton_norm import StackedBatchNorm

        old = [torch.zeros_like(weight) if kept is None else self._latest(kept) for kept in (mean, variance)]
        pieces = self.pieces.get(id(weight)), self.pieces.get(id(bias))
        out, known = StackedBatchNorm.apply(x, weight, bias, *old, eps, momentum, relu, pieces)  # type: ignore[no-untyped-call]
        if mean is not None and variance is not None:
            self.statistics[id(mean)], self.statistics[id(variance)] = known[4], known[5]
        return out  # type: ignore[no-any-return]

    def _normalised(
        self,
        x: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised by given statistics [J, C], or by those of the batch where `mean` is None; and the statistics."""
        wide = x.reshape(self.visits, -1, *x.shape[1:]).to(weight.dtype if weight is not None else x.dtype)
        spread = (self.visits, 1, x.shape[1], *(1,) * (x.dim() - 2))
        if mean is None or variance is None:
            var, centre = torch.var_mean(wide, dim=(1, *range(3, wide.dim())), correction=0, keepdim=True)
        else:
            var, centre = variance.reshape(spread), mean.reshape(spread)
        scale = torch.rsqrt(var + eps)
        if weight is not None:
            scale = scale * weight.reshape(spread)
        shift = -centre * scale if bias is None else bias.reshape(spread) - centre * scale
        return (wide * scale + shift).to(x.dtype).reshape(x.shape), centre, var

    def group_norm(
        self, x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """As F.group_norm with weights [J, C]."""
        return self._affine(F.group_norm(x, groups, None, None, eps), weight, bias)

    def layer_norm(
        self, x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """As F.layer_norm with weights [J, *shape]."""
        out = F.layer_norm(x, shape, None, None, eps)
        split = out.reshape(self.visits, -1, *shape)
        if weight is not None:
            split = split * weight.unsqueeze(1).to(x.dtype)
        if bias is not None:
            split = split + bias.unsqueeze(1).to(x.dtype)
        return split.reshape(x.shape)
