"""Networks of the benchmark `models`, as people write them in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import models

CLASSES, TOKENS, COLUMNS = 10, 65, 64  # labels, characters, columns of a table


class ConvNeXtBlock(nn.Module):
    """7x7 depthwise convolution, LayerNorm, two linear layers with GELU, and a layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.contract(F.gelu(self.expand(y))) * self.scale
        return x + y.permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class _LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of images."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = super().forward(input.permute(0, 2, 3, 1))
        return out.permute(0, 3, 1, 2)


def convnext(widths: Sequence[int] = (48, 96, 192), depth: int = 2, stem: int = 2) -> nn.Module:
    """A small ConvNeXt (Liu et al., CVPR 2022)."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], stem, stem), _LayerNorm2d(widths[0])]
    for n, width in enumerate(widths):
        if n:
            layers += [_LayerNorm2d(widths[n - 1]), nn.Conv2d(widths[n - 1], width, 2, 2)]
        layers += [ConvNeXtBlock(width) for _ in range(depth)]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1])]
    return nn.Sequential(*layers, *pool, nn.Linear(widths[-1], CLASSES))


class SqueezeExcitation(nn.Module):
    """Multiplies each channel by a number computed from the means of all channels."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.reduce, self.restore = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.restore(F.silu(self.reduce(means))))


class MBConv(nn.Module):
    """Expansion, depthwise convolution, squeeze-and-excitation, projection."""

    def __init__(self, inputs: int, outputs: int, expansion: int, size: int, stride: int) -> None:
        super().__init__()
        width = inputs * expansion
        expand = [nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU()]
        self.layers = nn.Sequential(
            *(expand if expansion > 1 else []),
            nn.Conv2d(width, width, size, stride, size // 2, groups=width, bias=False),
            nn.BatchNorm2d(width),
            nn.SiLU(),
            SqueezeExcitation(width, max(1, inputs // 4)),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.shortcut else y


def efficientnet(widths: Sequence[int] = (24, 48, 96)) -> nn.Module:
    """A small EfficientNet (Tan and Le, ICML 2019)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, padding=1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.SiLU(),
    ]
    before = widths[0]
    for n, width in enumerate(widths):
        size = 5 if n % 2 else 3
        layers += [MBConv(before, width, 4, size, 2), MBConv(width, width, 4, size, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def _double_conv(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A small U-Net: classes of all pixels, [B, H, W, C]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = _double_conv(3, width), _double_conv(width, 2 * width)
        self.bottom = _double_conv(2 * width, 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.third = _double_conv(4 * width, 2 * width)
        self.last_up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.fourth, self.out = _double_conv(2 * width, width), nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        coarse = self.second(F.max_pool2d(fine, 2))
        x = self.up(self.bottom(F.max_pool2d(coarse, 2)))
        x = self.last_up(self.third(torch.cat([x, coarse], 1)))
        return self.out(self.fourth(torch.cat([x, fine], 1))).movedim(1, -1)  # type: ignore[no-any-return]


def autoencoder(width: int = 32) -> nn.Module:
    """A convolutional autoencoder: two strided convolutions, and two transposed ones."""
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 3, 4, 2, 1),
    )


class Recurrent(nn.Module):
    """Next-character prediction by a recurrent layer."""

    def __init__(self, kind: Callable[..., nn.Module], width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32)
        self.layers = kind(32, width, layers, batch_first=True)
        self.out = nn.Linear(width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embedding(x))[0])  # type: ignore[no-any-return]


def gru(width: int = 256, layers: int = 2) -> nn.Module:
    """A GRU over characters."""
    return Recurrent(nn.GRU, width, layers)


def rnn(width: int = 256, layers: int = 2) -> nn.Module:
    """A plain RNN over characters."""
    return Recurrent(nn.RNN, width, layers)


class Encoder(nn.Module):
    """A classifier of texts by nn.TransformerEncoder, with dropout."""

    def __init__(self, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embedding(x)))  # type: ignore[no-any-return]


class TCN(nn.Module):
    """Dilated convolutions over characters."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, width, 3, padding=2**n, dilation=2**n) for n in range(depth)
        )
        self.out = nn.Linear(width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).transpose(1, 2)
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.out(x.transpose(1, 2))  # type: ignore[no-any-return]


def vgg(width: int = 32) -> nn.Module:
    """A small VGG: six convolutions, three max-poolings."""
    layers: list[nn.Module] = []
    before = 3
    for outputs in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(before, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        before = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * before, CLASSES))


def tabular(width: int = 256, depth: int = 3) -> nn.Module:
    """An MLP with LayerNorm for the rows of a table."""
    layers: list[nn.Module] = []
    for n in range(depth):
        layers += [nn.Linear(width if n else COLUMNS, width), nn.LayerNorm(width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def vit() -> nn.Module:
    """The registered vision transformer."""
    made: nn.Module = models["vit"](shape=(3, 32, 32), outputs=CLASSES)
    return made


def gpt() -> nn.Module:
    """The registered GPT."""
    made: nn.Module = models["gpt"](outputs=TOKENS, length=64)
    return made


def mobilenet() -> nn.Module:
    """The registered MobileNetV2."""
    made: nn.Module = models["mobilenet"](shape=(3, 32, 32), outputs=CLASSES)
    return made
