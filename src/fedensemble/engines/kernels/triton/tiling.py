"""Helpers that all Triton kernels share."""

from __future__ import annotations

import torch
import triton
from torch import Tensor


def block_size(size: int, most: int) -> int:
    """A power of two from 16 to `most` that covers `size` without much waste."""
    return max(16, min(most, int(triton.next_power_of_2(size))))


def matmul_precision() -> str:
    """How Triton computes float32 matmuls, from torch's setting."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def empty_channels_last(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An empty tensor [N, C, ...] in channels-last memory format.

    It is not a view, so that a module may write to it in place.
    """
    return torch.empty_permuted(
        shape, (0, *range(2, len(shape)), 1), dtype=x.dtype, device=x.device
    )
