"""Norms of J models on a folded batch: each visit with statistics and weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.randomness import KeyedRandomness
from ..errors import InputError
from . import kernels
from .pieces import Piece
from .rectified import Fate, Watch, summands


class NotFoldable(Exception):  # noqa: N818 (a finding, not a fault)
    """The module does something with its parameters that only `vmap` can batch."""


class FoldedNorms(KeyedRandomness):
    """The part of `Folded` that knows norms.

    Args:
        key, pieces, rectified, watch: as there.
    """

    def __init__(
        self, key: Tensor, pieces: Mapping[int, Piece], rectified: Sequence[Fate], watch: Watch | None
    ) -> None:
        super().__init__(key)
        self.visits, self.pieces = len(key), pieces
        self.statistics: dict[int, Tensor] = {}  # new running statistics, by the identity of the old
        self.rectified, self.watch, self.norms = rectified, watch, 0
        # By the identity of what the module holds, and that itself, so that nothing else gets its identity:
        self.awaited: dict[int, tuple[Tensor, Tensor]] = {}  # images that have had the ReLU which it will ask for
        self.waiting: dict[int, tuple[Tensor, Callable[[Tensor], Tensor]]] = {}  # norms that wait for their summand

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
        fate = self.rectified[self.norms] if self.norms < len(self.rectified) else ""
        self.norms += 1

        def done(more: Tensor | None = None) -> Tensor:
            if training and weight is not None and bias is not None and kernels.quick(x):
                return self._quick_norm(x, mean, variance, weight, bias, momentum, eps, fate != "", more)
            out, centre, var = self._normalised(x, None if training else mean, variance, weight, bias, eps)
            if training and mean is not None and variance is not None:
                unbiased = var * count / (count - 1)
                for kept, new in ((mean, centre), (variance, unbiased)):
                    moved = (1 - momentum) * self._latest(kept) + momentum * new.detach().reshape(kept.shape)
                    self.statistics[id(kept)] = moved
            out = out if more is None else out + more
            return F.relu(out) if fate else out

        if fate == "sum":
            stands_in = x.detach()
            self.waiting[id(stands_in)] = (stands_in, done)
            return stands_in
        out = done()
        if fate == "relu":
            self.awaited[id(out)] = (out, out)
        if self.watch is not None:
            self.watch.made(out)
        return out

    def add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """A sum, and the ReLU after it, with a norm that waits for it; None if there is no such in it."""
        pair = summands(args, kwargs)
        if pair is None or not any(id(value) in self.waiting for value in pair):
            return None
        norm, more = pair if id(pair[0]) in self.waiting else (pair[1], pair[0])
        out = self.waiting.pop(id(norm))[1](more)
        held = norm if func is Tensor.add_ else out  # what was written into goes on under its own name
        self.awaited[id(held)] = (held, out)
        return held

    def _latest(self, kept: Tensor) -> Tensor:
        """Running statistics as they are now: a layer may be used twice."""
        return self.statistics.get(id(kept), kept)

    def _quick_norm(
        self, x: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor, bias: Tensor, momentum: float,
        eps: float, relu: bool, more: Tensor | None,
    ) -> Tensor:  # fmt: skip
        from .triton_norm import StackedBatchNorm

        old = [torch.zeros_like(weight) if kept is None else self._latest(kept) for kept in (mean, variance)]
        pieces = self.pieces.get(id(weight)), self.pieces.get(id(bias))
        alike = more is None or (more.shape == x.shape and more.dtype == x.dtype)
        out, known = StackedBatchNorm.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, *old, eps, momentum, relu and alike, pieces, more if alike else None
        )
        if mean is not None and variance is not None:
            self.statistics[id(mean)], self.statistics[id(variance)] = known[4], known[5]
        return out if more is None or alike else F.relu(out + more)

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
