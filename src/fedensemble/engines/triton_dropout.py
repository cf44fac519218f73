"""Keyed dropout masks as one Triton kernel: the numbers of `draws.bits`, compared where they are made."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _kept(keys, out, SIZE, THRESHOLD, BLOCK: tl.constexpr):
    """out[j, i] = splitmix64(keys[j], i) >> 1 >= THRESHOLD."""
    j = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(keys + j).to(tl.uint64, bitcast=True) + (i + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = (z ^ (z >> 31)) >> 1
    tl.store(out + j * SIZE + i, z >= THRESHOLD.to(tl.uint64), mask=i < SIZE)


def kept(keys: Tensor, size: int, threshold: int) -> Tensor:
    """Which of `size` numbers at each key [J] reach the threshold, [J, size]."""
    out = torch.empty(len(keys), size, dtype=torch.bool, device=keys.device)
    block = 1024
    _kept[(triton.cdiv(size, block), len(keys))](keys.contiguous(), out, size, threshold, BLOCK=block)
    return out
