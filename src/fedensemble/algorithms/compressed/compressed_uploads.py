"""Base classes of algorithms with compressed uploads: QSGD, and DIANA and DORE."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.problem import LocalProblem
from ...core.types import Cohort
from ...errors import InputError, StoreError
from ...flat_params import Tree
from ..server_rate import ServerRate
from .compressors import Compressor, Dither, RandK, TopK

CompressorName = Literal["ternary", "dither", "terngrad", "qsgd", "rand-k", "top-k"]


@dataclass(frozen=True, kw_only=True)
class CompressedUploads(Algorithm):
    """An algorithm whose clients upload one compressed vector each.

    Args:
        compressor: "ternary" and "dither" round in blocks, "rand-k" and "top-k" drop entries; top-k
            is biased. "terngrad" (Wen et al. 2017) is ternary with the maximum norm, which is also
            what "ternary" is with the default norm; "qsgd" (Alistarh et al. 2017) is dithering with
            the 2-norm.
        block: number of entries that share a norm (all compressors that round).
        norm: norm of a block, "2" or "inf" (ternary, dither; "terngrad" and "qsgd" have their own).
        levels: number of steps from zero to the norm (dither, qsgd).
        share: fraction of entries that are kept (rand-k, top-k).
    """

    quantised = True
    needs_unbiased: ClassVar[bool] = True

    compressor: CompressorName = "ternary"
    # As in DORE's experiments. A block then takes 52 bytes of trits and 4 bytes for its norm.
    block: int = 256
    norm: Literal["2", "inf"] = "inf"  # the smallest variance of all p-norms
    levels: int = 4  # nine values, so that two fit into a byte
    share: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compressor not in get_args(CompressorName):
            *most, last = (f"'{name}'" for name in get_args(CompressorName))
            raise InputError(
                f"{type(self).__name__} needs compressor {', '.join(most)} or {last}; "
                f"got {self.compressor!r}."
            )
        # Building the codec also validates block, norm, levels and share.
        if not self.codec.unbiased and self.needs_unbiased:
            raise InputError(
                f"{type(self).__name__} needs an unbiased compressor; '{self.compressor}' is "
                "biased. Use 'ternary', 'dither' or 'rand-k'."
            )

    @cached_property
    def codec(self) -> Compressor:
        """The compressor that the options describe; its `encode` makes the bytes of a message."""
        if self.compressor in ("ternary", "terngrad"):
            return Dither(self.block, "inf" if self.compressor == "terngrad" else self.norm)
        if self.compressor in ("dither", "qsgd"):
            return Dither(self.block, "2" if self.compressor == "qsgd" else self.norm, self.levels)
        return RandK(self.share) if self.compressor == "rand-k" else TopK(self.share)

    def upload_bytes(self, uploads: Tree, shared_draw: Tensor) -> int:  # type: ignore[override] # no `sent`
        return sum(
            self.codec.bytes(value.shape[-1], value.element_size()) for value in uploads.values()
        )

    def encode(self, uploads: Tree, shared_draw: Tensor) -> Tree:
        return {
            name: torch.frombuffer(bytearray(self.codec.encode(value)), dtype=torch.uint8)
            for name, value in uploads.items()
        }

    def decode(self, message: Tree, like: Tree, shared_draw: Tensor) -> Tree:
        return {
            name: self.codec.decode(message[name].numpy().tobytes(), value.shape[-1], value.dtype)
            for name, value in like.items()
        }


@dataclass(frozen=True, kw_only=True)
class GradientDifferences(ServerRate, CompressedUploads):
    """The client side of DIANA and DORE: clients upload compressed gradient differences.

    g_i = (w - w_i) / lr;   d_i = Q(g_i - h_i) is uploaded;   h_i <- h_i + alpha d_i.

    With one local step, g_i is the minibatch gradient of the papers. The server's step size is
    server_lr times the clients' learning rate of the round, so that server_lr = 1 is the papers'
    step. With more local steps, g_i is FedAvg's pseudo-gradient, the sum of the local gradients.
    With a local optimizer other than SGD, it is the change of the model divided by the learning
    rate.

    h_i is stored in units of the gradient, not of the model. The change of a model shrinks with the
    learning rate: an h_i stored in units of the model would stay too long by the ratio of two rates
    after every decay, and the difference that is compressed would not go to 0.

    In the papers all clients participate. Here clients that do not participate keep their h_i, and
    the server's h stays the weighted mean over all N clients. With `weighting = "uniform"`, as in
    the papers, g = h + mean_S d_i is unbiased.

    Args:
        alpha: learning rate of h_i; None is 1 / (1 + omega), the largest value that theory allows.
        server_lr: step size of the server along the gradient, in units of the clients' learning
            rate.
    """

    full_participation = True

    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise InputError(
                f"{type(self).__name__} needs 0 < alpha <= 1 or None; got {self.alpha}."
            )

    def resolve_alpha(self, size: int) -> float:
        """The value of alpha for a model of P = `size` parameters."""
        return self.alpha if self.alpha is not None else 1 / (1 + self.codec.omega(size))

    def check_state(self, mode: Tree) -> None:
        if "h" in mode and "gradient" not in mode:
            raise StoreError(
                f"This checkpoint of {type(self).__name__} was written by an earlier version, "
                "which stored client state in units of the model (the learning rate times the "
                "gradient). This version stores gradients and cannot resume it. Start the run "
                "again in another folder, or finish it with the version that began it."
            )

    def init_client_state(self, theta: Tensor) -> Tree:
        return {"gradient": torch.zeros_like(theta)}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        start, h = sent["theta"], memory["gradient"]
        difference = (start - problem.descend(start)) / problem.lr - h
        compressed = self.codec.compress(difference, problem.uniform(difference))
        alpha = self.resolve_alpha(h.shape[-1])
        return {"difference": compressed}, {"gradient": h + alpha * compressed}

    def update_h(self, h: Tensor, difference: Tensor, cohort: Cohort) -> Tensor:
        """The server's next h: h + alpha share mean_S d_i; share is M/N with uniform weights."""
        return h + self.resolve_alpha(h.shape[-1]) * cohort.share * difference

    def server_step_size(self, cohort: Cohort) -> float | Tensor:
        """Step size of the server: its own rate times the clients' learning rate of the round."""
        return self.server_rate(cohort) * cohort.lr
