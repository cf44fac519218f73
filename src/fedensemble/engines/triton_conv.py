"""Convolutions with J sets of weights as Triton kernels: implicit matrix products, no patches in memory.

Images are channels-last, [J * B, H, W, C]; a visit's filters are a matrix [h * w * C, O]. One program computes a tile of one
visit's output. Tile sizes follow from the shape alone, so the same run gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]


@triton.jit  # type: ignore[untyped-decorator]
def _products(
    x, w, bias, out, B, H, W, C, OH, OW, O, K, STRIDE_H, STRIDE_W, PAD_H, PAD_W,
    KW: tl.constexpr, TURNED: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip  # noqa: ANN001, ANN202, E741
    """out[j, m, o] = sum_k patch(x)[j, m, k] w[j, k, o]; TURNED spreads by the stride instead of skipping by it."""
    j = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    M = B * OH * OW
    image, rest = rows // (OH * OW), rows % (OH * OW)
    oy, ox = rest // OW, rest % OW
    start = x + (j * B + image) * (H * W * C)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        tap, channel = k // C, k % C
        ky, kx = tap // KW, tap % KW
        if TURNED:
            ty, tx = oy[:, None] + PAD_H - ky[None, :], ox[:, None] + PAD_W - kx[None, :]
            iy, ix = ty // STRIDE_H, tx // STRIDE_W
            inside = (ty >= 0) & (tx >= 0) & (iy * STRIDE_H == ty) & (ix * STRIDE_W == tx) & (iy < H) & (ix < W)
        else:
            iy, ix = oy[:, None] * STRIDE_H - PAD_H + ky[None, :], ox[:, None] * STRIDE_W - PAD_W + kx[None, :]
            inside = (iy >= 0) & (ix >= 0) & (iy < H) & (ix < W)
        inside = inside & (rows < M)[:, None] & (k < K)[None, :]
        a = tl.load(start[:, None] + (iy * W + ix) * C + channel[None, :], mask=inside, other=0.0)
        b = tl.load(w + (j * K + k)[:, None] * O + columns[None, :], mask=(k < K)[:, None] & (columns < O)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + j * O + columns, mask=columns < O, other=0.0).to(tl.float32)[None, :]
    place = out + (j * M + rows)[:, None] * O + columns[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < O)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _along_weights(
    x, slope, out, J, B, H, W, C, OH, OW, O, K, STRIDE_H, STRIDE_W, PAD_H, PAD_W, SPLIT, SHARE,
    KW: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip  # noqa: ANN001, ANN202, E741
    """out[s, j, k, o] = sum over share s of m of patch(x)[j, m, k] slope[j, m, o]."""
    both = tl.program_id(2)
    j, split = (both // SPLIT).to(tl.int64), both % SPLIT
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    M = B * OH * OW
    tap, channel = k // C, k % C
    ky, kx = tap // KW, tap % KW
    total = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    for first in range(split * SHARE, min((split + 1) * SHARE, M), BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        image, rest = rows // (OH * OW), rows % (OH * OW)
        iy = (rest // OW)[:, None] * STRIDE_H - PAD_H + ky[None, :]
        ix = (rest % OW)[:, None] * STRIDE_W - PAD_W + kx[None, :]
        inside = (iy >= 0) & (ix >= 0) & (iy < H) & (ix < W) & (rows < M)[:, None] & (k < K)[None, :]
        start = x + (j * B + image) * (H * W * C)
        a = tl.load(start[:, None] + (iy * W + ix) * C + channel[None, :], mask=inside, other=0.0)
        there = slope + (j * M + rows)[:, None] * O + columns[None, :]
        b = tl.load(there, mask=(rows < M)[:, None] & (columns < O)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    place = out + ((split * J + j) * K + k)[:, None] * O + columns[None, :]
    tl.store(place, total, mask=(k < K)[:, None] & (columns < O)[None, :])


def _tile(size: int, most: int) -> int:
    """A power of two from 16 to `most` that covers `size` without much waste."""
    return max(16, min(most, triton.next_power_of_2(size)))


def _precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def products(
    x: Tensor, matrix: Tensor, bias: Tensor | None, out_size: Pair, wide: int, stride: Pair, padding: Pair, turned: bool
) -> Tensor:
    """Patches of images [J * B, H, W, C] times a matrix [J, K, O]: [J * B, OH, OW, O]."""
    visits, inner, outputs = matrix.shape
    total, height, width, channels = x.shape
    batch = total // visits
    out = x.new_empty(total, *out_size, outputs)
    rows = batch * out_size[0] * out_size[1]
    narrow = outputs <= 32
    block_m, block_n = (128 if rows >= 128 else _tile(rows, 128)), _tile(outputs, 128)
    block_k = _tile(inner, 32 if x.dtype == torch.float32 else 64)
    grid = (triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n), visits)
    _products[grid](
        x, matrix, bias if bias is not None else x, out, batch, height, width, channels, *out_size, outputs, inner,
        *stride, *padding, KW=wide, TURNED=turned, HAS_BIAS=bias is not None, PRECISION=_precision(),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4 if narrow or block_n < 128 else 8, num_stages=3,
    )  # fmt: skip
    return out


def along_weights(x: Tensor, slope: Tensor, visits: int, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Slopes of a matrix [J, K, O] of filters, from images and the slopes of outputs [J * B, OH, OW, O]; float32."""
    total, height, width, channels = x.shape
    _, out_height, out_width, outputs = slope.shape
    batch, inner = total // visits, size[0] * size[1] * channels
    rows = batch * out_height * out_width
    block_m = 32 if x.dtype == torch.float32 else 64
    block_k, block_n = _tile(inner, 64 if x.dtype == torch.float32 else 128), _tile(outputs, 128)
    tiles = triton.cdiv(inner, block_k) * triton.cdiv(outputs, block_n) * visits
    split = max(1, min(1024 // tiles, rows // (4 * block_m)))  # enough programs to fill the card
    share = triton.cdiv(triton.cdiv(rows, split), block_m) * block_m
    out = torch.empty(split, visits, inner, outputs, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(inner, block_k), triton.cdiv(outputs, block_n), visits * split)
    _along_weights[grid](
        x, slope, out, visits, batch, height, width, channels, out_height, out_width, outputs, inner, *stride, *padding,
        split, share, KW=size[1], PRECISION=_precision(), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out[0] if split == 1 else out.sum(0)


class TritonConvolution(torch.autograd.Function):
    """Visit j's images with visit j's filters: x [J * B, C, H, W], weight [J, O, C, h, w], bias [J, O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        visits, outputs, _, tall, wide = weight.shape
        last = x.permute(0, 2, 3, 1).contiguous()
        ctx.save_for_backward(last, weight)
        ctx.stride, ctx.padding, ctx.biased = stride, padding, bias is not None
        out_size = (
            (x.shape[2] + 2 * padding[0] - tall) // stride[0] + 1,
            (x.shape[3] + 2 * padding[1] - wide) // stride[1] + 1,
        )
        matrix = weight.permute(0, 3, 4, 2, 1).reshape(visits, -1, outputs).contiguous()
        return products(last, matrix, bias, out_size, wide, stride, padding, turned=False).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        last, weight = ctx.saved_tensors
        visits, outputs, channels, tall, wide = weight.shape
        back = slope.permute(0, 2, 3, 1).contiguous()
        along_x = along_weight = along_bias = None
        if ctx.needs_input_grad[0]:
            matrix = weight.permute(0, 3, 4, 1, 2).reshape(visits, -1, channels).contiguous()  # [J, h * w * O, C]
            size = (last.shape[1], last.shape[2])
            along_x = products(back, matrix, None, size, wide, ctx.stride, ctx.padding, turned=True).permute(0, 3, 1, 2)
        if ctx.needs_input_grad[1]:
            matrix = along_weights(last, back, visits, (tall, wide), ctx.stride, ctx.padding)
            along_weight = matrix.reshape(visits, tall, wide, channels, outputs).permute(0, 4, 3, 1, 2).to(weight.dtype)
        if ctx.biased and ctx.needs_input_grad[2]:
            along_bias = back.reshape(visits, -1, outputs).sum(1)
        return along_x, along_weight, along_bias, None, None
