"""Convolutions on a CPU where each visit has its own filters: the fastest algorithm per shape.

    python benchmarks/cpu_convolutions.py [--threads 1] [--seconds 0.3] [--random 200] [--quick]

Measures the forward and backward pass of one layer. The algorithms take turns, and the fastest call
of each counts. "chosen / best" is the time of the algorithm that the engine chooses by shape
(`engines/kernels/cpu_conv.py`) divided by that of the fastest; "per client / chosen" is the gain of
choosing. For larger models, each core trains a share of the visits, hence one thread. `--random`
adds shapes drawn with a fixed seed. A second table has layers followed by 2 × 2 max-pooling.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedensemble.bench.timing import LiveTable, fastest, machine, say, write
from fedensemble.engines.kernels.cpu_conv import (
    choose_algorithm,
    conv2d_cpu,
    grouped_conv,
    per_client_conv,
    pointwise_conv,
)
from fedensemble.engines.kernels.cpu_max_pool import MaxPool2d
from fedensemble.engines.stacked.dispatch import Im2ColConv
from fedensemble.runtime.malloc import keep_freed_memory


class Layer(NamedTuple):
    """A convolution of square feature maps with square filters."""

    name: str
    visits: int
    batch: int
    channels: int
    outputs: int
    image: int
    size: int
    stride: int = 1
    groups: int = 1
    padded: bool = True

    def __str__(self) -> str:
        """The shape of the layer in words."""
        step = f", stride {self.stride}" if self.stride > 1 else ""
        parts = f", {self.groups} groups" if self.groups > 1 else ""
        return (
            f"{self.channels} → {self.outputs}, {self.image}², {self.size}×{self.size}{step}{parts}"
        )


LAYERS = [
    Layer("digits CNN, first", 64, 16, 1, 8, 8, 3),
    Layer("digits CNN, second", 64, 16, 8, 8, 8, 3),
    Layer("digits CNN, second", 64, 4, 8, 8, 8, 3),
    Layer("MNIST CNN, first", 10, 32, 1, 10, 28, 5, padded=False),
    Layer("MNIST CNN, second", 10, 32, 10, 20, 12, 5, padded=False),
    Layer("MNIST CNN, second", 10, 8, 10, 20, 12, 5, padded=False),
    Layer("LeNet-5, second", 10, 4, 6, 16, 14, 5, padded=False),
    Layer("LeNet-5, second", 10, 32, 6, 16, 14, 5, padded=False),
    Layer("LeNet of Caffe, second", 5, 32, 20, 50, 12, 5, padded=False),
    Layer("McMahan's CNN, second", 3, 10, 32, 64, 14, 5),
    Layer("ResNet-20, stem", 10, 16, 3, 16, 32, 3),
    Layer("ResNet-20, stage 1", 10, 16, 16, 16, 32, 3),
    Layer("ResNet-20, stage 2", 10, 16, 16, 32, 32, 3, 2),
    Layer("ResNet-20, stage 3", 10, 4, 64, 64, 8, 3),
    Layer("ResNet-20, width 4, stage 2", 16, 8, 8, 8, 8, 3),
    Layer("ResNet-18, stage 1", 3, 16, 64, 64, 32, 3),
    Layer("MobileNetV2, depthwise", 10, 16, 96, 96, 16, 3, 2, 96),
    Layer("MobileNetV2, depthwise", 10, 4, 192, 192, 4, 3, 1, 192),
    Layer("MobileNetV2, 1×1", 10, 16, 16, 96, 32, 1),
    Layer("MobileNetV2, 1×1", 10, 16, 144, 24, 16, 1),
    Layer("MobileNetV2, 1×1", 5, 16, 320, 1280, 4, 1),
    Layer("four groups", 10, 8, 16, 16, 8, 3, 1, 4),
    Layer("two visits, one image", 2, 1, 8, 8, 4, 3),
]
POOLED = [
    Layer("MNIST CNN, first", 5, 32, 1, 10, 28, 5, padded=False),
    Layer("McMahan's CNN, first", 5, 32, 1, 32, 28, 5),
    Layer("McMahan's CNN, second", 5, 32, 32, 64, 14, 5),
    Layer("VGG, first", 5, 16, 3, 64, 32, 3),
    Layer("VGG, second", 3, 16, 64, 64, 32, 3),
    Layer("pfl's CNN, second", 5, 10, 32, 64, 30, 3, padded=False),
    Layer("three channels", 5, 10, 3, 32, 32, 3),
    Layer("one visit", 1, 32, 3, 32, 32, 3),
]
QUICK = [LAYERS[n] for n in (1, 4, 5, 11, 17, 19)]


def random_layers(count: int) -> list[Layer]:
    """Random shapes from a fixed seed, none of them slow."""
    rng, layers = random.Random(0), list[Layer]()
    while len(layers) < count:
        visits, batch = rng.choice([1, 2, 5, 10, 32, 64]), rng.choice([1, 4, 16, 32])
        channels = rng.choice([1, 3, 4, 8, 10, 16, 20, 24, 32, 64, 128, 256])
        outputs = rng.choice([channels, 2 * channels, rng.choice([4, 8, 10, 16, 32, 64])])
        image, size, stride = (
            rng.choice([4, 7, 8, 14, 16, 28, 32]),
            rng.choice([1, 3, 3, 5, 5, 7]),
            1 + rng.randrange(2),
        )
        groups = rng.choice([1, 1, 1, 2, channels])
        layer = Layer("random", visits, batch, channels, outputs, image, size, stride, groups)
        work = visits * batch * outputs * channels // groups * (size * image // stride) ** 2
        if (
            outputs % groups == channels % groups == 0
            and work < 5e8
            and visits * batch * channels * image**2 < 1e7
        ):
            layers.append(layer)
    return layers


def algorithms(layer: Layer) -> tuple[str, dict[str, Callable[[], object]]]:
    """The engine's choice, and the forward and backward pass of each algorithm."""
    x = torch.randn(layer.visits * layer.batch, layer.channels, layer.image, layer.image)
    x.requires_grad_(layer.channels > 3)  # the first layer needs no gradient of its input
    weight = torch.randn(
        layer.visits, layer.outputs, layer.channels // layer.groups, layer.size, layer.size
    )
    weight.requires_grad_()
    margin = layer.size // 2 if layer.padded else 0
    stride, padding, dilation = (layer.stride,) * 2, (margin, margin), (1, 1)
    rest = (stride, padding, dilation, layer.groups)
    inputs = (x, weight) if x.requires_grad else (weight,)
    grad_output = torch.randn_like(per_client_conv(x, weight, None, *rest).detach())
    forward: dict[str, Callable[[], Tensor]] = {
        "per client": lambda: per_client_conv(x, weight, None, *rest),
        "grouped": lambda: grouped_conv(x, weight, *rest),
        "grouped, channels last": lambda: grouped_conv(x, weight, *rest, channels_last=True),
    }
    if layer.groups == 1:
        forward["im2col"] = lambda: Im2ColConv.apply(x, weight, stride, padding).contiguous()
    if layer.groups == layer.size == 1:
        forward["pointwise"] = lambda: pointwise_conv(x, weight, None, stride)
    calls = {
        name: (lambda run=run: torch.autograd.grad(run(), inputs, grad_output))
        for name, run in forward.items()
    }
    return choose_algorithm(x, weight, *rest), calls


def pooling_algorithms(layer: Layer) -> dict[str, Callable[[], object]]:
    """The forward and backward pass of a convolution with each algorithm of max-pooling."""
    x = torch.randn(layer.visits * layer.batch, layer.channels, layer.image, layer.image)
    x.requires_grad_(layer.channels > 3)
    weight = torch.randn(
        layer.visits, layer.outputs, layer.channels, layer.size, layer.size, requires_grad=True
    )
    margin = layer.size // 2 if layer.padded else 0
    arguments = (x, weight, None, (1, 1), (margin, margin), (1, 1), 1)
    inputs = (x, weight) if x.requires_grad else (weight,)
    forward: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: F.max_pool2d(conv2d_cpu(*arguments), 2),
        "per plane": lambda: MaxPool2d.apply(conv2d_cpu(*arguments), 2),
    }
    grad_output = torch.randn_like(forward["torch"]().detach())
    return {
        name: (lambda run=run: torch.autograd.grad(run(), inputs, grad_output))
        for name, run in forward.items()
    }


def main() -> None:
    """Measures all layers and prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="per algorithm and shape")
    parser.add_argument("--random", type=int, default=0, help="number of random shapes to add")
    parser.add_argument("--quick", action="store_true", help="few shapes, a short time each")
    parser.add_argument("--out", type=Path, help="also write the tables as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    keep_freed_memory()
    names = ["per client", "grouped", "grouped, channels last", "pointwise", "im2col"]
    header = [
        "layer",
        "visits × batch",
        "shape",
        *(f"{name}, ms" for name in names),
        "chosen",
        "chosen / best",
    ]
    table = LiveTable(
        f"Convolutions, forward and backward. {machine('cpu')}",
        [*header, "per client / chosen"],
        say,
    )
    gains, losses = [], []
    for layer in (QUICK if options.quick else LAYERS) + random_layers(options.random):
        choice, calls = algorithms(layer)
        took = fastest(calls, "cpu", 0.02 if options.quick else options.seconds)
        gains.append(took["per client"] / took[choice])
        losses.append(took[choice] / min(took.values()))
        cells = [f"{1e3 * took[name]:.2f}" if name in took else "" for name in names]
        size = f"{layer.visits} × {layer.batch}"
        table.add(
            layer.name, size, str(layer), *cells, choice, f"{losses[-1]:.2f}", f"{gains[-1]:.2f}"
        )
    means = [exp(sum(map(log, values)) / len(values)) for values in (losses, gains)]
    table.add("geometric mean", *[""] * (len(header) - 2), *(f"{mean:.2f}" for mean in means))
    slow = sum(loss > 1.15 for loss in losses)
    say(f"\n{slow} of {len(losses)} are more than 15 % slower than the best algorithm.")
    names = ["torch", "per plane"]
    after = LiveTable(
        "Convolutions and pooling, forward and backward",
        [
            "layer",
            "visits × batch",
            "shape",
            *(f"{name}, ms" for name in names),
            "torch / per plane",
        ],
        say,
    )
    for layer in POOLED[:1] if options.quick else POOLED:
        took = fastest(pooling_algorithms(layer), "cpu", 0.02 if options.quick else options.seconds)
        ratio = f"{took['torch'] / took['per plane']:.2f}"
        cells = [f"{1e3 * took[name]:.2f}" for name in names]
        after.add(layer.name, f"{layer.visits} × {layer.batch}", str(layer), *cells, ratio)
    write(options.out, "cpu", [table, after])


if __name__ == "__main__":
    main()
