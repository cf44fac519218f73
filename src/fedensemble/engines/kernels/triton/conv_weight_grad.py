"""Weight gradient of convolutions: patches times output gradients, summed over pixels.

One program sums a block of one visit's matrix over a split of the pixels; the splits are added in a
fixed order, so that the same run gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .implicit_gemm import Pair, input_pixel
from .tiling import block_size, matmul_precision

_MANY_CHANNELS = 64  # input channels from which a program handles one filter tap
_PROGRAMS = 512  # fill an H200
_SUM_BLOCK = 1024  # elements that a program adds up over splits


@triton.jit  # type: ignore[untyped-decorator]
def _conv_weight_grad(
    x,
    grad_output,
    out,
    B,
    SPLIT,
    SPLIT_ROWS,
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
    """out[s, j, k, o] = sum of patch(x)[j, m, k] grad_output[j, m, o] over pixels m of split s."""
    both = tl.program_id(2)
    j, split = (both // SPLIT).to(tl.int64), both % SPLIT
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    M = B * OH * OW
    x += j * B * H * W * C
    grad_output += j * M * O
    if BY_TAP:  # a program has one tap and some of the channels
        tap = tl.program_id(0) // PARTS
        c = (tl.program_id(0) % PARTS) * BLOCK_K + tl.arange(0, BLOCK_K)
        k = tap * C + c
        real = c < C
    else:
        k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
        tap, c = (k // C)[None, :], k % C
        real = k < K
    total = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    for first in range(split * SPLIT_ROWS, min((split + 1) * SPLIT_ROWS, M), BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        image, rest = rows // (OH * OW), rows % (OH * OW)
        oy, ox = rest // OW, rest % OW
        if BY_TAP:
            offset, inside = input_pixel(
                oy, ox, tap // KW, tap % KW, H, W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, False
            )
            pixel = (x + image * (H * W * C) + offset * C)[:, None]
            inside = (inside & (rows < M))[:, None]
        else:
            offset, inside = input_pixel(
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
            pixel = x + (image * (H * W * C))[:, None] + offset * C
            inside = inside & (rows < M)[:, None]
        a = tl.load(pixel + c[None, :], mask=inside & real[None, :], other=0.0)
        there = grad_output + rows[:, None] * O + columns[None, :]
        b = tl.load(there, mask=(rows < M)[:, None] & (columns < O)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    offset = out + split.to(tl.int64) * S_STRIDE + j * J_STRIDE + k[:, None] * O + columns[None, :]
    tl.store(offset, total, mask=real[:, None] & (columns < O)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _sum_splits(parts, out, SPLIT, EACH, J_STRIDE, BLOCK: tl.constexpr):
    """out[j] = sum_s parts[s, j], EACH elements, in the order of s."""
    j = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in range(SPLIT):
        total += tl.load(
            parts + (s * tl.num_programs(1) + j) * EACH + at, mask=at < EACH, other=0.0
        )
    tl.store(out + j * J_STRIDE + at, total, mask=at < EACH)


def conv_weight_grad(
    x: Tensor,
    grad_output: Tensor,
    visits: int,
    size: Pair,
    stride: Pair,
    padding: Pair,
    result: Tensor | None = None,
) -> Tensor:
    """Gradient of the filters as a matrix [J, K, O], in float32.

    Args:
        x: channels-last images, [J * B, H, W, C].
        grad_output: [J * B, OH, OW, O].
        result: where to write the gradient; rows may have any stride.
    """
    total, height, width, channels = x.shape
    _, out_height, out_width, outputs = grad_output.shape
    batch, inner = total // visits, size[0] * size[1] * channels
    rows = batch * out_height * out_width
    by_tap = channels >= _MANY_CHANNELS
    block_m = 64 if channels <= _MANY_CHANNELS and x.dtype != torch.float32 else 32
    block_k = block_size(
        channels if by_tap else inner, 128 if by_tap and x.dtype != torch.float32 else 64
    )
    block_n = block_size(outputs, 128)
    parts = triton.cdiv(channels if by_tap else inner, block_k)
    row_blocks = parts * (size[0] * size[1] if by_tap else 1)
    tiles = row_blocks * triton.cdiv(outputs, block_n) * visits
    # enough programs to fill the GPU
    split = max(1, min(_PROGRAMS // tiles, rows // (4 * block_m)))
    split_rows = triton.cdiv(triton.cdiv(rows, split), block_m) * block_m
    if result is None:
        result = torch.empty(visits, inner, outputs, dtype=torch.float32, device=x.device)
    out = result.unsqueeze(0) if split == 1 else result.new_empty(split, visits, inner, outputs)
    _conv_weight_grad[(row_blocks, triton.cdiv(outputs, block_n), visits * split)](
        x,
        grad_output,
        out,
        batch,
        split,
        split_rows,
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
        PRECISION=matmul_precision(),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
    )
    if split > 1:
        _sum_splits[(triton.cdiv(inner * outputs, _SUM_BLOCK), visits)](
            out, result, split, inner * outputs, result.stride(0), BLOCK=_SUM_BLOCK
        )
    return result
