"""What methods that compress have in common: how to name a quantiser, and what a message costs."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from ..core.algorithm import Algorithm
from ..errors import InputError
from ..vectors import Tree
from .compress import Dither, Quantiser, RandK, TopK

Compressor = Literal["ternary", "dither", "rand-k", "top-k"]


@dataclass(frozen=True, kw_only=True)
class Compressed(Algorithm, ABC):
    """A method whose clients send one compressed vector each.

    Args:
        compressor: "ternary" and "dither" round in blocks, "rand-k" and "top-k" drop entries; top-k is biased.
        block: entries that share a norm (ternary, dither).
        norm: the block's norm, "2" or "inf" (ternary, dither).
        levels: steps from zero to the norm (dither).
        share: of entries that are kept (rand-k, top-k).
    """

    needs_unbiased: ClassVar[bool] = True

    compressor: Compressor = "ternary"
    block: int = 256  # DORE's experiments; a norm of 4 bytes on 51 bytes of trits
    norm: Literal["2", "inf"] = "inf"  # the smallest variance of all p-norms
    levels: int = 4  # nine values, two to a byte
    share: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compressor not in ("ternary", "dither", "rand-k", "top-k"):
            raise InputError(
                f"{type(self).__name__} needs compressor 'ternary', 'dither', 'rand-k' or 'top-k'; "
                f"got {self.compressor!r}."
            )
        if self.needs_unbiased and not self.quantiser.unbiased:
            raise InputError(
                f"{type(self).__name__} needs a compressor that is right on average; '{self.compressor}' is not. "
                "Use 'ternary', 'dither' or 'rand-k'."
            )

    @cached_property
    def quantiser(self) -> Quantiser:
        """The quantiser these settings name; its `encode` is what a client sends."""
        if self.compressor == "ternary":
            return Dither(self.block, self.norm)
        if self.compressor == "dither":
            return Dither(self.block, self.norm, self.levels)
        return RandK(self.share) if self.compressor == "rand-k" else TopK(self.share)

    def upload_bytes(self, uploads: Tree) -> int:
        return sum(self.quantiser.bytes(value.shape[-1], value.element_size()) for value in uploads.values())
