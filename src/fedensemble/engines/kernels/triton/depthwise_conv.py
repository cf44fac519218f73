"""Depthwise convolutions of J visits: every channel has a filter of its own.

No matmul is involved, so the kernels are bound by memory: a program reads each pixel under its
output pixels once from memory and again, for the other filter taps, from the cache. Images are
channels last, [J * B, H, W, C], and the filters of a visit a matrix [h * w, C].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...stacked.stacked_params import StackedParam
from .conv import as_stored, filter_matrix
from .implicit_gemm import Pair
from .tiling import empty_channels_last

_BLOCK_ROWS = 64  # pixels of a program
_GRAD_ROWS = 16  # pixels per step of the weight gradient
_PROGRAMS = 1056  # eight per multiprocessor of an H200


@triton.jit  # type: ignore[untyped-decorator]
def _depthwise(
    x,
    w,
    bias,
    out,
    B,
    W_STRIDE,
    BIAS_STRIDE,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out[j, m, c] = sum over taps of x[j, pixel(m, tap), c] w[j, tap, c].

    TRANSPOSED computes the input gradient: x is the output gradient, and a stride spreads pixels
    instead of skipping them.
    """
    j = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    image, rest = rows // (OH * OW), rows % (OH * OW)
    oy, ox = rest // OW, rest % OW
    real = rows < B * OH * OW
    x += j * B * H * W * C
    w += j * W_STRIDE
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for tap in range(KH * KW):
        ky, kx = tap // KW, tap % KW
        if TRANSPOSED:
            ty, tx = oy + PAD_H - ky * DILATION_H, ox + PAD_W - kx * DILATION_W
            iy, ix = ty // STRIDE_H, tx // STRIDE_W
            # `ty >= 0` first: division rounds towards zero
            inside = (ty >= 0) & (tx >= 0) & (iy * STRIDE_H == ty) & (ix * STRIDE_W == tx)
            inside = inside & (iy < H) & (ix < W)
        else:
            iy = oy * STRIDE_H - PAD_H + ky * DILATION_H
            ix = ox * STRIDE_W - PAD_W + kx * DILATION_W
            inside = (iy >= 0) & (ix >= 0) & (iy < H) & (ix < W)
        pixel = (image * H + iy) * W + ix
        value = tl.load(
            x + pixel[:, None] * C + c[None, :],
            mask=(inside & real)[:, None] & (c < C)[None, :],
            other=0.0,
        )
        factor = tl.load(w + tap * C + c, mask=c < C, other=0.0)
        total += value.to(tl.float32) * factor.to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + j * BIAS_STRIDE + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    at = out + j * B * OH * OW * C + rows[:, None] * C + c[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=real[:, None] & (c < C)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _depthwise_weight_grad(
    x,
    grad_output,
    out,
    B,
    SPLIT_ROWS,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out[s, j, tap, c] = sum of x[j, pixel(m, tap), c] grad_output[j, m, c] over pixels m of s.

    A program has one row of filter taps, so that it reads output gradients once for all of them.
    """
    j, split = tl.program_id(2).to(tl.int64), tl.program_id(1)
    ky = tl.program_id(0) // PARTS
    c = tl.program_id(0) % PARTS * BLOCK_C + tl.arange(0, BLOCK_C)
    kx = tl.arange(0, BLOCK_X)
    M = B * OH * OW
    x += j * B * H * W * C
    grad_output += j * M * C
    total = tl.zeros((BLOCK_X, BLOCK_R, BLOCK_C), dtype=tl.float32)
    for first in range(split * SPLIT_ROWS, tl.minimum((split + 1) * SPLIT_ROWS, M), BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        real = rows < M
        image, rest = rows // (OH * OW), rows % (OH * OW)
        oy, ox = rest // OW, rest % OW
        grad = tl.load(
            grad_output + rows[:, None] * C + c[None, :],
            mask=real[:, None] & (c < C)[None, :],
            other=0.0,
        ).to(tl.float32)
        iy = oy * STRIDE_H - PAD_H + ky * DILATION_H
        ix = (ox * STRIDE_W - PAD_W)[None, :] + (kx * DILATION_W)[:, None]
        inside = (real & (iy >= 0) & (iy < H))[None, :] & (ix >= 0) & (ix < W)
        inside = inside & (kx < KW)[:, None]
        pixel = ((image * H + iy) * W)[None, :] + ix
        value = tl.load(
            x + pixel[:, :, None] * C + c[None, None, :],
            mask=inside[:, :, None] & (c < C)[None, None, :],
            other=0.0,
        )
        total += value.to(tl.float32) * grad[None, :, :]
    at = out + ((split * tl.num_programs(2) + j) * (KH * KW) + ky * KW) * C
    at = at + kx[:, None] * C + c[None, :]
    tl.store(at, tl.sum(total, axis=1), mask=(kx < KW)[:, None] & (c < C)[None, :])


def _block_channels(channels: int) -> int:
    """Channels of a program: a power of two that wastes little."""
    return 64 if channels % 64 == 0 else 32 if channels > 16 else 16


def _shape(x_last: Tensor, out_size: Pair, size: Pair, step: tuple[Pair, Pair, Pair]) -> Any:
    """The constants of both kernels, for channels-last inputs [N, H, W, C]."""
    names = ("STRIDE", "PAD", "DILATION")
    steps = {f"{n}_{side}": p[k] for n, p in zip(names, step, strict=True) for k, side in _SIDES}
    _, height, width, channels = x_last.shape
    return {
        "H": height,
        "W": width,
        "C": channels,
        "OH": out_size[0],
        "OW": out_size[1],
        "KH": size[0],
        "KW": size[1],
        "BLOCK_C": _block_channels(channels),
        **steps,
    }


_SIDES = ((0, "H"), (1, "W"))


def _convolve(
    x_last: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    out_size: Pair,
    size: Pair,
    step: tuple[Pair, Pair, Pair],
    transposed: bool,
) -> Tensor:
    """The convolution, or its input gradient, in channels-last memory format [N, C, OH, OW]."""
    total, _, _, channels = x_last.shape
    visits = len(matrix)
    out = empty_channels_last(x_last, (total, channels, *out_size))
    rows = total // visits * out_size[0] * out_size[1]
    shape = _shape(x_last, out_size, size, step)
    grid = (triton.cdiv(rows, _BLOCK_ROWS), triton.cdiv(channels, shape["BLOCK_C"]), visits)
    _depthwise[grid](
        x_last,
        matrix,
        x_last if bias is None else bias,
        out,
        total // visits,
        matrix.stride(0),
        0 if bias is None else bias.stride(0),
        **shape,
        TRANSPOSED=transposed,
        HAS_BIAS=bias is not None,
        BLOCK_R=_BLOCK_ROWS,
        num_warps=4,
    )
    return out


def _weight_grad(
    x_last: Tensor, grad_last: Tensor, visits: int, size: Pair, step: tuple[Pair, Pair, Pair]
) -> Tensor:
    """The gradient of the filters, [J, h * w, C], in float32; splits are added in their order."""
    _, out_height, out_width, channels = grad_last.shape
    shape = _shape(x_last, (out_height, out_width), size, step)
    rows = len(x_last) // visits * out_height * out_width
    parts = triton.cdiv(channels, shape["BLOCK_C"])
    split = max(1, min(_PROGRAMS // (parts * size[0] * visits), rows // (4 * _GRAD_ROWS)))
    split_rows = triton.cdiv(triton.cdiv(rows, split), _GRAD_ROWS) * _GRAD_ROWS
    out = torch.empty(
        split, visits, size[0] * size[1], channels, dtype=torch.float32, device=x_last.device
    )
    _depthwise_weight_grad[(parts * size[0], split, visits)](
        x_last,
        grad_last,
        out,
        len(x_last) // visits,
        split_rows,
        **shape,
        PARTS=parts,
        BLOCK_X=triton.next_power_of_2(size[1]),
        BLOCK_R=_GRAD_ROWS,
        num_warps=4,
    )
    return out[0] if split == 1 else out.sum(0)


class TritonDepthwise(torch.autograd.Function):
    """Convolves channel c of the examples of visit j with filter c of visit j.

    Shapes: x [J * B, C, H, W], weight [J, C, 1, h, w], bias [J, C]. Sums are float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        param: StackedParam | None,
    ) -> Tensor:
        size, step = (weight.shape[3], weight.shape[4]), (stride, padding, dilation)
        x_last = x.permute(0, 2, 3, 1).contiguous()
        matrix = filter_matrix(param.weight if param is not None else weight, x.dtype)
        ctx.save_for_backward(x_last, matrix)
        bias_type = None if bias is None else bias.dtype
        ctx.param, ctx.given = param, (size, weight.dtype, bias_type, step)
        height, width = (
            (x.shape[2 + n] + 2 * padding[n] - dilation[n] * (size[n] - 1) - 1) // stride[n] + 1
            for n in (0, 1)
        )
        return _convolve(x_last, matrix, bias, (height, width), size, step, transposed=False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        x_last, matrix = ctx.saved_tensors
        size, weight_type, bias_type, step = ctx.given
        visits, channels = len(matrix), x_last.shape[3]
        grad_last = grad_output.permute(0, 2, 3, 1).contiguous()
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            in_size = (x_last.shape[1], x_last.shape[2])
            grad_input = _convolve(grad_last, matrix, None, in_size, size, step, transposed=True)
        if ctx.needs_input_grad[1]:
            grad = _weight_grad(x_last, grad_last, visits, size, step)
            buffer = None if ctx.param is None else ctx.param.grad_buffer()
            if buffer is not None:
                as_stored(buffer).copy_(grad)
            else:
                filters = grad.reshape(visits, *size, 1, channels)
                grad_weight = filters.permute(0, 4, 3, 1, 2).to(weight_type)
        if bias_type is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_last.reshape(visits, -1, channels).sum(1, dtype=bias_type)
        return grad_input, grad_weight, grad_bias, None, None, None, None
