"""What all Triton kernels share: sizes of tiles, the precision of products, room for images."""

from __future__ import annotations

import torch
import triton
from torch import Tensor


def tile(size: int, most: int) -> int:
    """A power of two from 16 to `most` that covers `size` without much waste."""
    return max(16, min(most, int(triton.next_power_of_2(size))))


def precision() -> str:
    """How products of float32 numbers are computed."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def images_like(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Room for images [N, C, ...], channels last in memory; no view, so that a module may write
    into them.
    """
    return torch.empty_permuted(
        shape, (0, *range(2, len(shape)), 1), dtype=x.dtype, device=x.device
    )
