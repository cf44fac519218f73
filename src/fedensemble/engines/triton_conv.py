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

from .pieces import Piece

Pair = tuple[int, int]


@triton.jit  # type: ignore[untyped-decorator]
def _inside(
    oy, ox, ky, kx, H: tl.constexpr, W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
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
    x, w, bias, out, B, W_STRIDE, BIAS_STRIDE, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BY_TAP: tl.constexpr,
    EVERY_H: tl.constexpr, EVERY_W: tl.constexpr, TURNED: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[j, m, o] = sum_k patch(x)[j, m, k] w[j, k, o]; TURNED spreads by the stride instead of skipping by it.

    BY_TAP goes filter tap by filter tap, so that an index is worked out once for many channels; with few channels taps
    and channels are gone through as one. TURNED, w is the matrix of the forward pass, [taps, O, C] in the names here,
    and by tap a program has every EVERY_H-th row and EVERY_W-th column of pixels, for which most taps meet nothing.
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
        for step in range((KH - first_y + EVERY_H - 1) // EVERY_H * across * parts):
            ky, kx = first_y + step // parts // across * EVERY_H, first_x + step // parts % across * EVERY_W
            c = step % parts * BLOCK_K + tl.arange(0, BLOCK_K)
            place, inside = _inside(oy, ox, ky, kx, H, W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, TURNED)
            there = (inside & real)[:, None] & (c < C)[None, :]
            a = tl.load((x + start + place * C)[:, None] + c[None, :], mask=there, other=0.0)
            tap = ky * KW + kx
            if TURNED:
                line = w + (tap * O + columns)[:, None] * C + c[None, :]
                b = tl.trans(tl.load(line, mask=(columns < O)[:, None] & (c < C)[None, :], other=0.0))
            else:
                line = w + (tap * C + c)[:, None] * O + columns[None, :]
                b = tl.load(line, mask=(c < C)[:, None] & (columns < O)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    else:
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            tap, c = k // C, k % C
            place, inside = _inside(
                oy[:, None], ox[:, None], (tap // KW)[None, :], (tap % KW)[None, :], H, W, STRIDE_H, STRIDE_W,
                PAD_H, PAD_W, TURNED,
            )  # fmt: skip
            inside = inside & real[:, None] & (k < K)[None, :]
            a = tl.load(x + start[:, None] + place * C + c[None, :], mask=inside, other=0.0)
            if TURNED:
                line = w + (tap[:, None] * O + columns[None, :]) * C + c[:, None]
            else:
                line = w + k[:, None] * O + columns[None, :]
            b = tl.load(line, mask=(k < K)[:, None] & (columns < O)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + j * BIAS_STRIDE + columns, mask=columns < O, other=0.0).to(tl.float32)[None, :]
    pixel = (image * OH + oy) * OW + ox
    place = out + j * B * OH * OW * O + pixel[:, None] * O + columns[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=real[:, None] & (columns < O)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _along_weights(
    x, slope, out, B, SPLIT, SHARE, J_STRIDE, S_STRIDE, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr, STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, PARTS: tl.constexpr, KW: tl.constexpr,
    BY_TAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
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
    place = out + split.to(tl.int64) * S_STRIDE + j * J_STRIDE + k[:, None] * O + columns[None, :]
    tl.store(place, total, mask=real[:, None] & (columns < O)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _total(parts, out, SPLIT, EACH, J_STRIDE, BLOCK: tl.constexpr):
    """out[j] = sum_s parts[s, j], EACH numbers, in the order of s."""
    j = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in range(SPLIT):
        total += tl.load(parts + (s * tl.num_programs(1) + j) * EACH + at, mask=at < EACH, other=0.0)
    tl.store(out + j * J_STRIDE + at, total, mask=at < EACH)


_ADDED = 1024  # numbers that a program adds up
_MANY = 16  # input channels from which filter taps are gone through one by one
_MANY_BACK = 64  # likewise for slopes of weights
_PROCESSORS = 132  # of an H200


def tile(size: int, most: int) -> int:
    """A power of two from 16 to `most` that covers `size` without much waste."""
    return max(16, min(most, triton.next_power_of_2(size)))


def _tiles(dtype: torch.dtype, rows: int, outputs: int, inner: int, visits: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and inner numbers of a product's tile, warps and stages: the fastest of a search on an H200."""
    block_m, block_n = tile(rows, 128), tile(outputs, 128)
    if dtype == torch.float32:
        return block_m, block_n, tile(inner, 32), 8 if block_n >= 128 else 4, 3
    tall = triton.cdiv(rows, 128) * visits  # programs, where tiles have 128 rows
    if outputs > 128 and tall * triton.cdiv(outputs, 256) >= _PROCESSORS:
        return block_m, 256, tile(inner, 64), 8, 3
    if outputs > 64 and (outputs > 128 or tall < 8 * _PROCESSORS):
        return min(block_m, 64), 128, tile(inner, 64), 4, 4 if inner >= 512 else 3
    return block_m, block_n, tile(inner, 64), 4, 3


def precision() -> str:
    """How products of float32 numbers are computed."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def images_like(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Room for images [N, C, ...], channels last in memory; no view, so that a module may write into them."""
    return torch.empty_permuted(shape, (0, *range(2, len(shape)), 1), dtype=x.dtype, device=x.device)


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
    """Patches of images [J * B, H, W, C] times a matrix [J, h * w * C, O]: [J * B, O, OH, OW], channels last in memory.

    Turned, it goes the other way with the same matrix: from slopes of outputs to slopes of images.
    """
    taps = size[0] * size[1]
    total, height, width, channels = x.shape
    visits = len(matrix)
    inner, outputs = (taps * channels, matrix.shape[1] // taps) if turned else matrix.shape[1:]
    batch = total // visits
    out = images_like(x, (total, outputs, *out_size))
    by_tap = channels >= _MANY
    every = stride if turned and by_tap else (1, 1)
    rows = batch * triton.cdiv(out_size[0], every[0]) * triton.cdiv(out_size[1], every[1])
    block_m, block_n, block_k, warps, stages = _tiles(x.dtype, rows, outputs, channels if by_tap else inner, visits)
    grid = (triton.cdiv(rows, block_m) * every[0] * every[1], triton.cdiv(outputs, block_n), visits)
    _products[grid](
        x, matrix, x if bias is None else bias, out, batch, matrix.stride(0), 0 if bias is None else bias.stride(0),
        K=inner, H=height, W=width, C=channels, OH=out_size[0], OW=out_size[1], O=outputs, STRIDE_H=stride[0],
        STRIDE_W=stride[1], PAD_H=padding[0], PAD_W=padding[1], KH=size[0], KW=size[1], BY_TAP=by_tap,
        EVERY_H=every[0], EVERY_W=every[1], TURNED=turned, HAS_BIAS=bias is not None, PRECISION=precision(),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def along_weights(
    x: Tensor, slope: Tensor, visits: int, size: Pair, stride: Pair, padding: Pair, place: Tensor | None = None
) -> Tensor:
    """Slopes of a matrix [J, K, O] of filters, from images and the slopes of outputs [J * B, OH, OW, O]; float32.

    Args:
        place: where to write them; rows may lie apart.
    """
    total, height, width, channels = x.shape
    _, out_height, out_width, outputs = slope.shape
    batch, inner = total // visits, size[0] * size[1] * channels
    rows = batch * out_height * out_width
    by_tap = channels >= _MANY_BACK
    block_m = 64 if channels <= _MANY_BACK and x.dtype != torch.float32 else 32
    block_k = tile(channels if by_tap else inner, 128 if by_tap and x.dtype != torch.float32 else 64)
    block_n = tile(outputs, 128)
    parts = triton.cdiv(channels if by_tap else inner, block_k)
    pieces = parts * (size[0] * size[1] if by_tap else 1)
    tiles = pieces * triton.cdiv(outputs, block_n) * visits
    split = max(1, min(512 // tiles, rows // (4 * block_m)))  # enough programs to fill the card
    share = triton.cdiv(triton.cdiv(rows, split), block_m) * block_m
    if place is None:
        place = torch.empty(visits, inner, outputs, dtype=torch.float32, device=x.device)
    out = place.unsqueeze(0) if split == 1 else place.new_empty(split, visits, inner, outputs)
    _along_weights[(pieces, triton.cdiv(outputs, block_n), visits * split)](
        x, slope, out, batch, split, share, out.stride(1), out.stride(0), K=inner, H=height, W=width, C=channels,
        OH=out_height, OW=out_width, O=outputs, STRIDE_H=stride[0], STRIDE_W=stride[1], PAD_H=padding[0],
        PAD_W=padding[1], PARTS=parts, KW=size[1], BY_TAP=by_tap, PRECISION=precision(), BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=3,
    )  # fmt: skip
    if split > 1:
        _total[(triton.cdiv(inner * outputs, _ADDED), visits)](
            out, place, split, inner * outputs, place.stride(0), BLOCK=_ADDED
        )
    return place


class TritonConvolution(torch.autograd.Function):
    """Visit j's images with visit j's filters: x [J * B, C, H, W], weight [J, O, C, h, w], bias [J, O].

    Products are in the type of x; the slope of the weights comes in float32, whatever that is, and goes to its piece's
    place if there is one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, piece: Piece | None
    ) -> Tensor:
        tall, wide = weight.shape[3:]
        last = x.permute(0, 2, 3, 1).contiguous()
        matrix = _matrix(piece.weight if piece is not None else weight, x.dtype)
        ctx.save_for_backward(last, matrix)
        ctx.piece = piece
        ctx.given = (weight.shape, weight.dtype, None if bias is None else bias.dtype, stride, padding)
        out_size = (
            (x.shape[2] + 2 * padding[0] - tall) // stride[0] + 1,
            (x.shape[3] + 2 * padding[1] - wide) // stride[1] + 1,
        )
        return products(last, matrix, bias, out_size, (tall, wide), stride, padding, turned=False)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        last, matrix = ctx.saved_tensors
        (visits, outputs, channels, *size), weight_type, bias_type, stride, padding = ctx.given
        back = slope.permute(0, 2, 3, 1).contiguous()
        along_x = along_weight = along_bias = None
        if ctx.needs_input_grad[0]:
            along_x = products(back, matrix, None, tuple(last.shape[1:3]), tuple(size), stride, padding, turned=True)
        if ctx.needs_input_grad[1]:
            place = None if ctx.piece is None else ctx.piece.place()
            if place is not None:
                along_weights(last, back, visits, tuple(size), stride, padding, _stored(place))
            else:
                found = along_weights(last, back, visits, tuple(size), stride, padding)
                along_weight = found.reshape(visits, *size, channels, outputs).permute(0, 4, 3, 1, 2).to(weight_type)
        if bias_type is not None and ctx.needs_input_grad[2]:
            along_bias = back.reshape(visits, -1, outputs).sum(1, dtype=bias_type)
        return along_x, along_weight, along_bias, None, None, None


def _stored(filters: Tensor) -> Tensor:
    """Filters [J, O, C, h, w] as they lie in a weight vector: [J, h * w * C, O], a view."""
    return filters.permute(0, 3, 4, 2, 1).flatten(1, 3)


def _matrix(filters: Tensor, dtype: torch.dtype) -> Tensor:
    """The same as the kernels take it: each visit's in one piece, in the type of products."""
    lying = filters.permute(0, 3, 4, 2, 1)
    if lying.dtype == dtype and lying[0].is_contiguous():
        return lying.flatten(1, 3)
    return torch.empty(lying.shape, dtype=dtype, device=lying.device).copy_(lying).flatten(1, 3)
