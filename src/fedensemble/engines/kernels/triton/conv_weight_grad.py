"""Slopes of the filters of J visits: patches of images times slopes of outputs, summed over a
visit's pixels.

One program sums a tile of one visit's matrix over a share of the pixels; shares are added up in a
fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .implicit_gemm import Pair, inside_image
from .tiling import precision, tile

_MANY = 64  # input channels from which filter taps are gone through one by one
_PROGRAMS = 512  # fill an H200
_ADDED = 1024  # numbers that a program adds up over shares


@triton.jit  # type: ignore[untyped-decorator]
def _along_weights(
    x,
    slope,
    out,
    B,
    SPLIT,
    SHARE,
    J_STRIDE,
    S_STRIDE,
    K: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    O: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    PARTS: tl.constexpr,
    KW: tl.constexpr,
    BY_TAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[s, j, k, o] = sum over share s of m of patch(x)[j, m, k] slope[j, m, o]."""
    both = tl.program_id(2)
    j, split = (both // SPLIT).to(tl.int64), both % SPLIT
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    M = B * OH * OW
    x += j * B * H * W * C
    slope += j * M * O
    if BY_TAP:  # a program has one tap and a part of the channels
        tap = tl.program_id(0) // PARTS
        c = (tl.program_id(0) % PARTS) * BLOCK_K + tl.arange(0, BLOCK_K)
        k = tap * C + c
        real = c < C
    else:
        k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
        tap, c = (k // C)[None, :], k % C
        real = k < K
    total = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    for first in range(split * SHARE, min((split + 1) * SHARE, M), BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        image, rest = rows // (OH * OW), rows % (OH * OW)
        oy, ox = rest // OW, rest % OW
        if BY_TAP:
            place, inside = inside_image(
                oy, ox, tap // KW, tap % KW, H, W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, False
            )
            pixel = (x + image * (H * W * C) + place * C)[:, None]
            inside = (inside & (rows < M))[:, None]
        else:
            place, inside = inside_image(
                oy[:, None],
                ox[:, None],
                tap // KW,
                tap % KW,
                H,
                W,
                STRIDE_H,
                STRIDE_W,
                PAD_H,
                PAD_W,
                False,
            )
            pixel = x + (image * (H * W * C))[:, None] + place * C
            inside = inside & (rows < M)[:, None]
        a = tl.load(pixel + c[None, :], mask=inside & real[None, :], other=0.0)
        there = slope + rows[:, None] * O + columns[None, :]
        b = tl.load(there, mask=(rows < M)[:, None] & (columns < O)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    place = out + split.to(tl.int64) * S_STRIDE + j * J_STRIDE + k[:, None] * O + columns[None, :]
    tl.store(place, total, mask=real[:, None] & (columns < O)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _total(parts, out, SPLIT, EACH, J_STRIDE, BLOCK: tl.constexpr):
    """out[j] = sum_s parts[s, j], EACH numbers, in the order of s."""
    j = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in range(SPLIT):
        total += tl.load(
            parts + (s * tl.num_programs(1) + j) * EACH + at, mask=at < EACH, other=0.0
        )
    tl.store(out + j * J_STRIDE + at, total, mask=at < EACH)


def along_weights(
    x: Tensor,
    slope: Tensor,
    visits: int,
    size: Pair,
    stride: Pair,
    padding: Pair,
    place: Tensor | None = None,
) -> Tensor:
    """Slopes of a matrix [J, K, O] of filters, from images and the slopes of outputs [J * B, OH,
    OW, O]; float32.

    Args:
        place: where to write them; rows may lie apart.
    """
    total, height, width, channels = x.shape
    _, out_height, out_width, outputs = slope.shape
    batch, inner = total // visits, size[0] * size[1] * channels
    rows = batch * out_height * out_width
    by_tap = channels >= _MANY
    block_m = 64 if channels <= _MANY and x.dtype != torch.float32 else 32
    block_k = tile(
        channels if by_tap else inner, 128 if by_tap and x.dtype != torch.float32 else 64
    )
    block_n = tile(outputs, 128)
    parts = triton.cdiv(channels if by_tap else inner, block_k)
    pieces = parts * (size[0] * size[1] if by_tap else 1)
    tiles = pieces * triton.cdiv(outputs, block_n) * visits
    # enough programs to fill the card
    split = max(1, min(_PROGRAMS // tiles, rows // (4 * block_m)))
    share = triton.cdiv(triton.cdiv(rows, split), block_m) * block_m
    if place is None:
        place = torch.empty(visits, inner, outputs, dtype=torch.float32, device=x.device)
    out = place.unsqueeze(0) if split == 1 else place.new_empty(split, visits, inner, outputs)
    _along_weights[(pieces, triton.cdiv(outputs, block_n), visits * split)](
        x,
        slope,
        out,
        batch,
        split,
        share,
        out.stride(1),
        out.stride(0),
        K=inner,
        H=height,
        W=width,
        C=channels,
        OH=out_height,
        OW=out_width,
        O=outputs,
        STRIDE_H=stride[0],
        STRIDE_W=stride[1],
        PAD_H=padding[0],
        PAD_W=padding[1],
        PARTS=parts,
        KW=size[1],
        BY_TAP=by_tap,
        PRECISION=precision(),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
    )
    if split > 1:
        _total[(triton.cdiv(inner * outputs, _ADDED), visits)](
            out, place, split, inner * outputs, place.stride(0), BLOCK=_ADDED
        )
    return place
