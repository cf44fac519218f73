"""Formulations of depthwise convolutions with stacked filters, in ms for forward and backward pass.

    python benchmarks/gpu_depthwise.py

50 visits with 16 images each, bf16, layers of ConvNeXt, EfficientNet and MobileNetV2.
"""

import torch
import torch.nn.functional as F

from fedensemble.bench.timing import LiveTable, machine, say
from fedensemble.engines.kernels.cpu_conv import grouped_conv
from fedensemble.engines.kernels.triton.depthwise_conv import TritonDepthwise

VISITS, BATCH, REPEATS = 50, 16, 10
# channels, side, size of the filter, stride
LAYERS = [(48, 16, 7, 1), (96, 8, 7, 1), (192, 4, 7, 1), (96, 32, 3, 2), (192, 16, 5, 2)]
LAYERS += [(384, 8, 3, 1), (960, 4, 3, 1)]


def shifted(x, weight, stride, padding):
    """A sum over filter taps of shifted images times filters, in plain operations."""
    tall, wide = weight.shape[3:]
    padded = F.pad(x, (padding,) * 4)
    height, width = ((n + 2 * padding - tall) // stride + 1 for n in x.shape[2:])
    out = 0
    for ky in range(tall):
        rows = padded[:, :, ky : ky + height * stride : stride]
        for kx in range(wide):
            part = rows[..., kx : kx + width * stride : stride].unflatten(0, (VISITS, -1))
            out = out + part * weight[:, None, :, 0, ky, kx, None, None]
    return out.flatten(0, 1)


def formulations(channels, stride, padding):
    """The ways to compute one layer, by name."""
    pair, pad = (stride, stride), (padding, padding)
    return {
        "cuDNN, grouped": lambda x, w: grouped_conv(x, w, pair, pad, groups=channels),
        "the same, channels last": lambda x, w: grouped_conv(
            x, w, pair, pad, groups=channels, channels_last=True
        ),
        "sum of shifts": lambda x, w: shifted(x, w, stride, padding),
        "Triton": lambda x, w: TritonDepthwise.apply(x, w, None, pair, pad, (1, 1), None),
    }


def milliseconds(function, x, weight):
    """Time of one forward and backward pass, the fastest of several repeats of ten."""
    out = function(x, weight)
    back = torch.randn_like(out)

    def once():
        torch.autograd.grad(function(x, weight), (x, weight), back)

    for _ in range(3):
        once()
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            once()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / REPEATS)
    return best


def main():
    """Prints the table."""
    ways = formulations(1, 1, 1)
    header = ("layer", *ways, "reading and writing alone")
    table = LiveTable(f"Depthwise convolutions, ms. {machine('cuda')}", header, say)
    for channels, side, size, stride in LAYERS:
        x = torch.randn(VISITS * BATCH, channels, side, side, device="cuda", dtype=torch.bfloat16)
        x = x.to(memory_format=torch.channels_last).requires_grad_()
        weight = torch.randn(VISITS, size, size, 1, channels, device="cuda", dtype=x.dtype)
        weight = weight.permute(0, 4, 3, 1, 2).requires_grad_()
        ways = formulations(channels, stride, size // 2).values()
        times = [f"{milliseconds(way, x, weight):.3f}" for way in ways]
        # Forward and both gradients: at least three reads or writes of each tensor, at 4 TB/s.
        least = 3 * (x.numel() + x.numel() // stride**2) * 2 / 4.0e9
        table.add(f"{channels} channels, {side}², {size}×{size} /{stride}", *times, f"{least:.3f}")


if __name__ == "__main__":
    main()
