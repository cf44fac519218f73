"""Convolutions with J sets of weights as Triton kernels: implicit matrix products, no patches in memory.

Images are channels-last, [J * B, H, W, C]; a visit's filters are a matrix [h * w * C, O]. One program computes a tile
of one visit's output. Tile sizes follow from the shape alone, so the same run gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]


@triton.jit  # type: ignore[untyped-decorator]
def _inside(oy, ox, ky, kx, H, W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, TURNED: tl.constexpr):
    """Where output (oy, ox) meets its input under tap (ky, kx), and whether that is inside the image."""
    if TURNED:
        ty, tx = oy + PAD_H - ky, ox + PAD_W - kx
        iy, ix = ty // STRIDE_H, tx // STRIDE_W
        inside = (ty >= 0) & (tx >= 0) & (iy * STRIDE_H == ty) & (ix * STRIDE_W == tx) & (iy < H) & (ix < W)
    else:
        iy, ix = oy * STRIDE_H - PAD_H + ky, ox * STRIDE_W - PAD_W + kx
        inside = (iy >= 0) & (ix >= 0) & (iy < H) & (ix < W)
    return iy * W + ix, inside


@triton.jit  # type: ignore[untyped-decorator]
def _products(
    x, w, bias, out, B, H, W, C, OH, OW, O, K, STRIDE_H, STRIDE_W, PAD_H, PAD_W,
    KW: tl.constexpr, TAPS: tl.constexpr, BY_TAP: tl.constexpr, TURNED: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[j, m, o] = sum_k patch(x)[j, m, k] w[j, k, o]; TURNED spreads by the stride instead of skipping by it.

    BY_TAP goes filter tap by filter tap, so that an index is worked out once for many channels; with few channels taps
    and channels are gone through as one.
    """
    j = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    M = B * OH * OW
    image, rest = rows // (OH * OW), rows % (OH * OW)
    oy, ox = rest // OW, rest % OW
    x += j * B * H * W * C
    w += j * K * O
    start = image * (H * W * C)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if BY_TAP:
        channels = tl.arange(0, BLOCK_K)
        for tap in range(TAPS):
            place, inside = _inside(oy, ox, tap // KW, tap % KW, H, W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, TURNED)
            inside = inside & (rows < M)
            pixel = x + start + place * C
            for first in range(0, C, BLOCK_K):
                c = first + channels
                a = tl.load(pixel[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
                if TURNED:  # the matrix is that of the forward pass, [taps, O, C] in the names used here
                    line = w + (tap * O + columns)[:, None] * C + c[None, :]
                    b = tl.trans(tl.load(line, mask=(columns < O)[:, None] & (c < C)[None, :], other=0.0))
                else:
                    line = w + (tap * C + c)[:, None] * O + columns[None, :]
                    b = tl.load(line, mask=(c < C)[:, None] & (columns < O)[None, :], other=0.0)
                total = tl.dot(a, b, total, input_precision=PRECISION)
    else:
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            tap = k // C
            place, inside = _inside(
                oy[:, None], ox[:, None], (tap // KW)[None, :], (tap % KW)[None, :], H, W, STRIDE_H, STRIDE_W,
                PAD_H, PAD_W, False,
            )  # fmt: skip
            inside = inside & (rows < M)[:, None] & (k < K)[None, :]
            a = tl.load(x + start[:, None] + place * C + (k % C)[None, :], mask=inside, other=0.0)
            b = tl.load(
                w + k[:, None] * O + columns[None, :], mask=(k < K)[:, None] & (columns < O)[None, :], other=0.0
            )
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + j * O + columns, mask=columns < O, other=0.0).to(tl.float32)[None, :]
    place = out + j * M * O + rows[:, None] * O + columns[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < O)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _along_weights(
    x, slope, out, J, B, H, W, C, OH, OW, O, K, STRIDE_H, STRIDE_W, PAD_H, PAD_W, SPLIT, SHARE, PARTS,
    KW: tl.constexpr, BY_TAP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
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
            place, inside = _inside(oy, ox, tap // KW, tap % KW, H, W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, False)
            pixel = (x + image * (H * W * C) + place * C)[:, None]
            inside = (inside & (rows < M))[:, None]
        else:
            place, inside = _inside(
                oy[:, None], ox[:, None], tap // KW, tap % KW, H, W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, False
            )
            pixel = x + (image * (H * W * C))[:, None] + place * C
            inside = inside & (rows < M)[:, None]
        a = tl.load(pixel + c[None, :], mask=inside & real[None, :], other=0.0)
        there = slope + rows[:, None] * O + columns[None, :]
        b = tl.load(there, mask=(rows < M)[:, None] & (columns < O)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    place = out + (split * J + j) * K * O + k[:, None] * O + columns[None, :]
    tl.store(place, total, mask=real[:, None] & (columns < O)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _gathered(
    patches, out, TOTAL, H, W, C, OH, OW, STRIDE_H, STRIDE_W, PAD_H, PAD_W, KW: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n, y, x, c] = the sum of what patches [N, OH, OW, taps, C] hold of that pixel."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, rest = at % C, at // C
    ix, rest = rest % W, rest // W
    iy, n = rest % H, rest // H
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in range(TAPS):
        place, inside = _inside(iy, ix, tap // KW, tap % KW, OH, OW, STRIDE_H, STRIDE_W, PAD_H, PAD_W, True)
        there = ((n * (OH * OW) + place).to(tl.int64) * TAPS + tap) * C + c
        total += tl.load(patches + there, mask=inside & (at < TOTAL), other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < TOTAL)


_FEW = 8  # input channels below which taps and channels are gone through as one
_NARROW = 32  # input channels below which the slope along images is one product and a gathering of patches


def _tile(size: int, most: int) -> int:
    """A power of two from 16 to `most` that covers `size` without much waste."""
    return max(16, min(most, triton.next_power_of_2(size)))


def _precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def products(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    out_size: Pair,
    size: Pair,
    stride: Pair,
    padding: Pair,
    turned: bool,
) -> Tensor:
    """Patches of images [J * B, H, W, C] times a matrix [J, h * w * C, O]: [J * B, OH, OW, O].

    Turned, it goes the other way with the same matrix: from slopes of outputs to slopes of images.
    """
    taps = size[0] * size[1]
    total, height, width, channels = x.shape
    visits = len(matrix)
    inner, outputs = (taps * channels, matrix.shape[1] // taps) if turned else matrix.shape[1:]
    batch = total // visits
    out = x.new_empty(total, *out_size, outputs)
    rows = batch * out_size[0] * out_size[1]
    block_m, block_n = (128 if rows >= 128 else _tile(rows, 128)), _tile(outputs, 128)
    by_tap, most = turned or channels >= _FEW, 32 if x.dtype == torch.float32 else 64
    block_k = _tile(channels if by_tap else inner, most)
    grid = (triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n), visits)
    _products[grid](
        x, matrix, x if bias is None else bias.contiguous(), out, batch, height, width, channels, *out_size,
        outputs, inner, *stride, *padding, KW=size[1], TAPS=taps, BY_TAP=by_tap, TURNED=turned,
        HAS_BIAS=bias is not None, PRECISION=_precision(), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=8 if block_n >= 128 else 4, num_stages=3,
    )  # fmt: skip
    return out


def along_weights(x: Tensor, slope: Tensor, visits: int, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Slopes of a matrix [J, K, O] of filters, from images and the slopes of outputs [J * B, OH, OW, O]; float32."""
    total, height, width, channels = x.shape
    _, out_height, out_width, outputs = slope.shape
    batch, inner = total // visits, size[0] * size[1] * channels
    rows = batch * out_height * out_width
    by_tap, block_m = channels >= _FEW, 32 if x.dtype == torch.float32 else 64
    block_k = _tile(channels if by_tap else inner, 64 if x.dtype == torch.float32 else 128)
    block_n = _tile(outputs, 128)
    parts = triton.cdiv(channels if by_tap else inner, block_k)
    pieces = parts * (size[0] * size[1] if by_tap else 1)
    tiles = pieces * triton.cdiv(outputs, block_n) * visits
    split = max(1, min(1024 // tiles, rows // (4 * block_m)))  # enough programs to fill the card
    share = triton.cdiv(triton.cdiv(rows, split), block_m) * block_m
    out = torch.empty(split, visits, inner, outputs, dtype=torch.float32, device=x.device)
    _along_weights[(pieces, triton.cdiv(outputs, block_n), visits * split)](
        x, slope, out, visits, batch, height, width, channels, out_height, out_width, outputs, inner, *stride, *padding,
        split, share, parts, KW=size[1], BY_TAP=by_tap, PRECISION=_precision(), BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, num_warps=8 if block_k * block_n >= 128 * 128 else 4, num_stages=3,
    )  # fmt: skip
    return out[0] if split == 1 else out.sum(0)


def along_images(back: Tensor, matrix: Tensor, shape: Any, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Slopes of images [J * B, H, W, C] from slopes of outputs [J * B, OH, OW, O]."""
    total, height, width, channels = shape
    if channels >= _NARROW:
        return products(back, matrix, None, (height, width), size, stride, padding, turned=True)
    visits, out_height, out_width = len(matrix), back.shape[1], back.shape[2]
    patches = torch.bmm(back.reshape(visits, -1, back.shape[3]), matrix.transpose(1, 2))  # [J, B * OH * OW, h * w * C]
    out = back.new_empty(total, height, width, channels)
    _gathered[(triton.cdiv(out.numel(), 1024),)](
        patches, out, out.numel(), height, width, channels, out_height, out_width, *stride, *padding,
        KW=size[1], TAPS=size[0] * size[1], BLOCK=1024,
    )  # fmt: skip
    return out


class TritonConvolution(torch.autograd.Function):
    """Visit j's images with visit j's filters: x [J * B, C, H, W], weight [J, O, C, h, w], bias [J, O].

    Products are in the type of x; the slope of the weights comes in float32, whatever that is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        visits, outputs, channels, tall, wide = weight.shape
        last = x.permute(0, 2, 3, 1).contiguous()
        matrix = torch.empty(visits, tall, wide, channels, outputs, dtype=x.dtype, device=x.device)
        matrix = matrix.copy_(weight.permute(0, 3, 4, 2, 1)).reshape(visits, -1, outputs)
        ctx.save_for_backward(last, matrix)
        ctx.given = (weight.shape, weight.dtype, None if bias is None else bias.dtype, stride, padding)
        out_size = (
            (x.shape[2] + 2 * padding[0] - tall) // stride[0] + 1,
            (x.shape[3] + 2 * padding[1] - wide) // stride[1] + 1,
        )
        out = products(last, matrix, bias, out_size, (tall, wide), stride, padding, turned=False)
        return out.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        last, matrix = ctx.saved_tensors
        (visits, outputs, channels, *size), weight_type, bias_type, stride, padding = ctx.given
        back = slope.permute(0, 2, 3, 1).contiguous()
        along_x = along_weight = along_bias = None
        if ctx.needs_input_grad[0]:
            along_x = along_images(back, matrix, last.shape, tuple(size), stride, padding).permute(0, 3, 1, 2)
        if ctx.needs_input_grad[1]:
            found = along_weights(last, back, visits, tuple(size), stride, padding)
            along_weight = found.reshape(visits, *size, channels, outputs).permute(0, 4, 3, 1, 2).to(weight_type)
        if bias_type is not None and ctx.needs_input_grad[2]:
            along_bias = back.reshape(visits, -1, outputs).sum(1, dtype=bias_type)
        return along_x, along_weight, along_bias, None, None
