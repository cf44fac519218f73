"""Convolution as implicit GEMM: patches times filters, without patches in memory.

Images are channels last, [J * B, H, W, C]; the filters of a visit are a matrix [h * w * C, O]. One
program computes a block of one visit's output. Block sizes follow from the shape alone, so that the
same run gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiling import block_size, empty_channels_last, matmul_precision

Pair = tuple[int, int]

_MANY_CHANNELS = 16  # input channels from which the loop goes over filter taps
_MULTIPROCESSORS = 132  # of an H200


@triton.jit  # type: ignore[untyped-decorator]
def input_pixel(
    oy,
    ox,
    ky,
    kx,
    H: tl.constexpr,
    W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Index of the input pixel under filter tap (ky, kx) of output pixel (oy, ox), and whether it
    is inside the image.
    """
    if TRANSPOSED:
        ty, tx = oy + PAD_H - ky, ox + PAD_W - kx
        iy, ix = ty // STRIDE_H, tx // STRIDE_W
        inside = (
            (ty >= 0)
            & (tx >= 0)
            & (iy * STRIDE_H == ty)
            & (ix * STRIDE_W == tx)
            & (iy < H)
            & (ix < W)
        )
    else:
        iy, ix = oy * STRIDE_H - PAD_H + ky, ox * STRIDE_W - PAD_W + kx
        inside = (iy >= 0) & (ix >= 0) & (iy < H) & (ix < W)
    return iy * W + ix, inside


@triton.jit  # type: ignore[untyped-decorator]
def _implicit_gemm(
    x,
    w,
    bias,
    out,
    B,
    W_STRIDE,
    BIAS_STRIDE,
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
    KH: tl.constexpr,
    KW: tl.constexpr,
    BY_TAP: tl.constexpr,
    EVERY_H: tl.constexpr,
    EVERY_W: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[j, m, o] = sum_k patch(x)[j, m, k] w[j, k, o].

    BY_TAP iterates over filter taps, so that a pixel index is computed once for many channels; with
    few channels, taps and channels form one loop. TRANSPOSED computes the input gradient:
    w is the matrix of the forward pass, [taps, O, C] in the names used here, and a stride spreads
    pixels instead of skipping them. By tap, a program then has every EVERY_H-th row and EVERY_W-th
    column of pixels, because all others meet none of its filter taps.
    """
    j = tl.program_id(2).to(tl.int64)
    below, beside = tl.program_id(0) % (EVERY_H * EVERY_W) // EVERY_W, tl.program_id(0) % EVERY_W
    tall: tl.constexpr = (OH + EVERY_H - 1) // EVERY_H
    wide: tl.constexpr = (OW + EVERY_W - 1) // EVERY_W
    rows = tl.program_id(0) // (EVERY_H * EVERY_W) * BLOCK_M + tl.arange(0, BLOCK_M)
    image, rest = rows // (tall * wide), rows % (tall * wide)
    oy, ox = rest // wide * EVERY_H + below, rest % wide * EVERY_W + beside
    real = (image < B) & (oy < OH) & (ox < OW)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x += j * B * H * W * C
    w += j * W_STRIDE
    start = image * (H * W * C)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if BY_TAP:
        parts: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K
        first_y, first_x = (below + PAD_H) % EVERY_H, (beside + PAD_W) % EVERY_W
        across = (KW - first_x + EVERY_W - 1) // EVERY_W
        some = tl.maximum(across, 1)  # there may be none, and loads run ahead of the loop
        for step in range((KH - first_y + EVERY_H - 1) // EVERY_H * across * parts):
            ky, kx = (
                first_y + step // parts // some * EVERY_H,
                first_x + step // parts % some * EVERY_W,
            )
            c = step % parts * BLOCK_K + tl.arange(0, BLOCK_K)
            offset, inside = input_pixel(
                oy, ox, ky, kx, H, W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, TRANSPOSED
            )
            there = (inside & real)[:, None] & (c < C)[None, :]
            a = tl.load((x + start + offset * C)[:, None] + c[None, :], mask=there, other=0.0)
            tap = ky * KW + kx
            if TRANSPOSED:
                line = w + (tap * O + columns)[:, None] * C + c[None, :]
                b = tl.trans(
                    tl.load(line, mask=(columns < O)[:, None] & (c < C)[None, :], other=0.0)
                )
            else:
                line = w + (tap * C + c)[:, None] * O + columns[None, :]
                b = tl.load(line, mask=(c < C)[:, None] & (columns < O)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    else:
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            tap, c = k // C, k % C
            offset, inside = input_pixel(
                oy[:, None],
                ox[:, None],
                (tap // KW)[None, :],
                (tap % KW)[None, :],
                H,
                W,
                STRIDE_H,
                STRIDE_W,
                PAD_H,
                PAD_W,
                TRANSPOSED,
            )
            inside = inside & real[:, None] & (k < K)[None, :]
            a = tl.load(x + start[:, None] + offset * C + c[None, :], mask=inside, other=0.0)
            if TRANSPOSED:
                line = w + (tap[:, None] * O + columns[None, :]) * C + c[:, None]
            else:
                line = w + k[:, None] * O + columns[None, :]
            b = tl.load(line, mask=(k < K)[:, None] & (columns < O)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + j * BIAS_STRIDE + columns, mask=columns < O, other=0.0).to(
            tl.float32
        )[None, :]
    pixel = (image * OH + oy) * OW + ox
    offset = out + j * B * OH * OW * O + pixel[:, None] * O + columns[None, :]
    tl.store(offset, total.to(out.dtype.element_ty), mask=real[:, None] & (columns < O)[None, :])


def _tiles(
    dtype: torch.dtype, rows: int, outputs: int, inner: int, visits: int
) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a block, warps and stages: the fastest in a search on an H200."""
    block_m, block_n = block_size(rows, 128), block_size(outputs, 128)
    if dtype == torch.float32:
        return block_m, block_n, block_size(inner, 32), 8 if block_n >= 128 else 4, 3
    tall = triton.cdiv(rows, 128) * visits  # programs, where tiles have 128 rows
    if outputs > 128 and tall * triton.cdiv(outputs, 256) >= _MULTIPROCESSORS:
        return block_m, 256, block_size(inner, 64), 8, 3
    if outputs > 64 and (outputs > 128 or tall < 8 * _MULTIPROCESSORS):
        return min(block_m, 64), 128, block_size(inner, 64), 4, 4 if inner >= 512 else 3
    return block_m, block_n, block_size(inner, 64), 4, 3


def implicit_gemm(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    out_size: Pair,
    size: Pair,
    stride: Pair,
    padding: Pair,
    transposed: bool,
) -> Tensor:
    """Patches of images [J * B, H, W, C] times a matrix [J, h * w * C, O].

    Returns [J * B, O, OH, OW] in channels-last memory format. With `transposed` it computes the
    gradient w.r.t. the input from the gradient w.r.t. the output, with the same matrix.
    """
    taps = size[0] * size[1]
    total, height, width, channels = x.shape
    visits = len(matrix)
    inner, outputs = (taps * channels, matrix.shape[1] // taps) if transposed else matrix.shape[1:]
    batch = total // visits
    out = empty_channels_last(x, (total, outputs, *out_size))
    by_tap = channels >= _MANY_CHANNELS
    every = stride if transposed and by_tap else (1, 1)
    rows = batch * triton.cdiv(out_size[0], every[0]) * triton.cdiv(out_size[1], every[1])
    block_m, block_n, block_k, warps, stages = _tiles(
        x.dtype, rows, outputs, channels if by_tap else inner, visits
    )
    grid = (triton.cdiv(rows, block_m) * every[0] * every[1], triton.cdiv(outputs, block_n), visits)
    _implicit_gemm[grid](
        x,
        matrix,
        x if bias is None else bias,
        out,
        batch,
        matrix.stride(0),
        0 if bias is None else bias.stride(0),
        K=inner,
        H=height,
        W=width,
        C=channels,
        OH=out_size[0],
        OW=out_size[1],
        O=outputs,
        STRIDE_H=stride[0],
        STRIDE_W=stride[1],
        PAD_H=padding[0],
        PAD_W=padding[1],
        KH=size[0],
        KW=size[1],
        BY_TAP=by_tap,
        EVERY_H=every[0],
        EVERY_W=every[1],
        TRANSPOSED=transposed,
        HAS_BIAS=bias is not None,
        PRECISION=matmul_precision(),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
    )
    return out
