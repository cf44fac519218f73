"""What methods that compress have in common: a quantiser by name, the cost of a message, gradient
differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.problem import LocalProblem
from ..core.types import Cohort
from ..errors import InputError, StoreError
from ..flat_params import Tree
from .compressors import Dither, Quantiser, RandK, TopK
from .server_rate import ServerRate

Compressor = Literal["ternary", "dither", "terngrad", "qsgd", "rand-k", "top-k"]


@dataclass(frozen=True, kw_only=True)
class Compressed(Algorithm):
    """A method whose clients send one compressed vector each.

    Args:
        compressor: "ternary" and "dither" round in blocks, "rand-k" and "top-k" drop entries; top-k
            is biased. Two of these have names of their own: "terngrad" (Wen et al. 2017) is ternary
            with the maximum norm, which is also what "ternary" is with the default norm; "qsgd"
            (Alistarh et al. 2017) is dithering with the 2-norm.
        block: entries that share a norm (all that round).
        norm: the block's norm, "2" or "inf" (ternary, dither; "terngrad" and "qsgd" have their
            own).
        levels: steps from zero to the norm (dither, qsgd).
        share: of entries that are kept (rand-k, top-k).
    """

    quantised = True
    needs_unbiased: ClassVar[bool] = True

    compressor: Compressor = "ternary"
    block: int = 256  # DORE's experiments; a norm of 4 bytes on 52 bytes of trits
    norm: Literal["2", "inf"] = "inf"  # the smallest variance of all p-norms
    levels: int = 4  # nine values, two to a byte
    share: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compressor not in get_args(Compressor):
            *most, last = (f"'{name}'" for name in get_args(Compressor))
            raise InputError(
                f"{type(self).__name__} needs compressor {', '.join(most)} or {last}; got {self.compressor!r}."
            )
        # builds the quantiser, which checks its own settings
        if not self.quantiser.unbiased and self.needs_unbiased:
            raise InputError(
                f"{type(self).__name__} needs a compressor that is right on average; '{self.compressor}' is not. "
                "Use 'ternary', 'dither' or 'rand-k'."
            )

    @cached_property
    def quantiser(self) -> Quantiser:
        """The quantiser these settings name; its `encode` is what is sent."""
        if self.compressor in ("ternary", "terngrad"):
            return Dither(self.block, "inf" if self.compressor == "terngrad" else self.norm)
        if self.compressor in ("dither", "qsgd"):
            return Dither(self.block, "2" if self.compressor == "qsgd" else self.norm, self.levels)
        return RandK(self.share) if self.compressor == "rand-k" else TopK(self.share)

    def upload_bytes(self, uploads: Tree, coin: Tensor) -> int:  # type: ignore[override] # needs no `sent`
        return sum(
            self.quantiser.bytes(value.shape[-1], value.element_size())
            for value in uploads.values()
        )

    def encode(self, uploads: Tree, coin: Tensor) -> Tree:
        return {
            name: torch.frombuffer(bytearray(self.quantiser.encode(value)), dtype=torch.uint8)
            for name, value in uploads.items()
        }

    def decode(self, message: Tree, like: Tree, coin: Tensor) -> Tree:
        return {
            name: self.quantiser.decode(
                message[name].numpy().tobytes(), value.shape[-1], value.dtype
            )
            for name, value in like.items()
        }


@dataclass(frozen=True, kw_only=True)
class GradientDifferences(ServerRate, Compressed):
    """The clients' side of DIANA and DORE: g_i = (w - w_i) / lr; d_i = Q(g_i - h_i) is sent; h_i <-
    h_i + alpha d_i.

    With one local step g_i is the papers' minibatch gradient, and the server's step size is
    server_lr times the clients' rate of the round, so that server_lr = 1 is the papers' step. With
    more steps g_i is FedAvg's pseudo-gradient, the sum of the local gradients. With another local
    optimiser it is the change of the model divided by the rate.

    h_i is kept in units of the gradient and not of the model. A change of the model shrinks with
    the rate: an h_i learned before the rate decayed would be too long by the ratio of the two
    rates, for ever, and the difference that is compressed would not go to 0.

    The papers have all clients take part. Here those who do not keep h_i, and the server's h stays
    the weighted mean of all N; with `weighting = "uniform"`, the papers' own, g = h + mean_S d_i is
    right on average.

    Args:
        alpha: how fast h_i learns; None is 1 / (1 + omega), the most that theory allows.
        server_lr: the server's step along the gradient, in units of the clients' rate.
    """

    full_participation = True

    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise InputError(
                f"{type(self).__name__} needs 0 < alpha <= 1 or None; got {self.alpha}."
            )

    def pace(self, size: int) -> float:
        """Alpha for P = `size`."""
        return self.alpha if self.alpha is not None else 1 / (1 + self.quantiser.omega(size))

    def check_state(self, mode: Tree) -> None:
        if "h" in mode and "gradient" not in mode:
            raise StoreError(
                f"This checkpoint of {type(self).__name__} was written by an earlier version, which kept what clients "
                "remember in units of the model (the learning rate times the gradient). This version keeps gradients "
                "and cannot continue it. Start the run again in another folder, or finish it with the version that "
                "began it."
            )

    def init_memory(self, theta: Tensor) -> Tree:
        return {"gradient": torch.zeros_like(theta)}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        start, h = sent["theta"], memory["gradient"]
        difference = (start - problem.descend(start)) / problem.lr - h
        compressed = self.quantiser.compress(difference, problem.uniform(difference))
        return {"difference": compressed}, {"gradient": h + self.pace(h.shape[-1]) * compressed}

    def learned(self, h: Tensor, difference: Tensor, cohort: Cohort) -> Tensor:
        """The server's next h: h + alpha share mean_S d_i, the share being M/N with uniform
        weights.
        """
        return h + self.pace(h.shape[-1]) * cohort.share * difference

    def step_size(self, cohort: Cohort) -> float:
        """How far the server steps along a gradient: the clients' rate of the round times the
        server's own.
        """
        return self.server_rate(cohort) * cohort.lr
