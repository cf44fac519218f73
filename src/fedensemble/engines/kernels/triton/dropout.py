"""PRNG keys and dropout masks: the random bits of `prng`, one kernel launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _mix(z):
    """splitmix64's mixing."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit  # type: ignore[untyped-decorator]
def _dropout_mask(keys, out, SIZE, THRESHOLD, BLOCK: tl.constexpr):
    """out[j, i] = splitmix64(keys[j], i) >> 1 >= THRESHOLD."""
    j = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(keys + j).to(tl.uint64, bitcast=True) + (i + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = _mix(z) >> 1
    tl.store(out + j * SIZE + i, z >= THRESHOLD.to(tl.uint64), mask=i < SIZE)


@triton.jit(do_not_specialize=["word"])  # type: ignore[untyped-decorator]
def _fold_in(keys, word, out, J, AT: tl.constexpr, BLOCK: tl.constexpr):
    """out[j] = prng.fold_in(keys[j], word); AT: `word` is a pointer."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(word) if AT else word
    z = tl.load(keys + j, mask=j < J, other=0).to(tl.uint64, bitcast=True)
    z = _mix(z ^ 0x5851F42D4C957F2D) + (number + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    tl.store(out + j, _mix(z).to(tl.int64, bitcast=True), mask=j < J)


def fold_in(keys: Tensor, word: int | Tensor) -> Tensor:
    """As `prng.fold_in` of keys [J] and one word, an integer or a tensor of one."""
    out, block = torch.empty_like(keys), 128
    at = isinstance(word, Tensor)
    _fold_in[(triton.cdiv(len(keys), block),)](
        keys.contiguous(), word, out, len(keys), AT=at, BLOCK=block
    )
    return out


def dropout_mask(keys: Tensor, size: int, threshold: int) -> Tensor:
    """True where random bits reach the threshold, [J, size], from one key per visit, [J]."""
    out = torch.empty(len(keys), size, dtype=torch.bool, device=keys.device)
    block = 1024
    _dropout_mask[(triton.cdiv(size, block), len(keys))](
        keys.contiguous(), out, size, threshold, BLOCK=block
    )
    return out
