"""MobileNetV2."""

from collections.abc import Sequence

from torch import Tensor, nn

from .argument_checks import check_dropout
from .augment import augmentation_layer
from .layers import Norm, check_images, init_convolutions, norm_layer
from .registry import models

# Table 2 of the paper: expansion, channels, blocks, stride of the first block.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_STEM, _LAST = 32, 1280


class Block(nn.Module):
    """Inverted residual: 1x1 expansion, 3x3 depthwise convolution, 1x1 projection without ReLU."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        expansion: int,
        stride: int,
        norm: Norm,
        groups: int,
    ) -> None:
        super().__init__()
        hidden = expansion * in_channels
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [
                nn.Conv2d(in_channels, hidden, 1, bias=False),
                norm_layer(norm, hidden, groups),
                nn.ReLU6(),
            ]
        layers += [
            nn.Conv2d(hidden, hidden, 3, stride, padding=1, groups=hidden, bias=False),
            norm_layer(norm, hidden, groups),
            nn.ReLU6(),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            norm_layer(norm, out_channels, groups),
        ]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.residual else y


@models.register("mobilenet")
class MobileNet(nn.Module):
    """MobileNetV2 for small images.

    A 3x3 convolution, 17 inverted residuals, a 1x1 convolution, the mean over pixels and a linear
    layer. 2,236,682 parameters for 3 channels and 10 classes at width 1 (3,504,872 for 1000, as in
    torchvision), with either norm. Initialized as in torchvision.

    Reference: Sandler, Howard, Zhu, Zhmoginov and Chen, "MobileNetV2: inverted residuals and linear
    bottlenecks", CVPR 2018.

    Args:
        shape: (channels, height, width) of one image.
        outputs: number of classes.
        width: factor of the numbers of channels, which are rounded to multiples of 8.
        norm: "batch" or "group".
        groups: number of groups of GroupNorm.
        stem_stride: stride of the first convolution; the blocks downsample by another factor of 16.
            With 1, a 32x32 image ends as 2x2 pixels and a 64x64 image as 4x4; 2, as in the paper,
            is for larger images.
        dropout: probability of dropout before the linear layer.
        augment: random crops and flips of training images, see `PadCropFlip`; also of test images
            if prediction keeps dropout active.
    """

    def __init__(
        self,
        shape: Sequence[int],
        outputs: int,
        width: float = 1.0,
        norm: Norm = "batch",
        groups: int = 2,
        stem_stride: int = 1,
        dropout: float = 0.2,
        augment: bool = False,
    ) -> None:
        super().__init__()
        check_dropout("mobilenet", dropout)
        check_images("mobilenet", shape, width=width, stem_stride=stem_stride)
        in_channels = _round_to_8(_STEM * width)
        last_channels = _round_to_8(_LAST * max(1.0, width))
        layers: list[nn.Module] = [
            nn.Conv2d(shape[0], in_channels, 3, stem_stride, padding=1, bias=False),
            norm_layer(norm, in_channels, groups),
            nn.ReLU6(),
        ]
        for expansion, channels, count, stride in _STAGES:
            out_channels = _round_to_8(channels * width)
            for index in range(count):
                block_stride = stride if index == 0 else 1
                layers.append(
                    Block(in_channels, out_channels, expansion, block_stride, norm, groups)
                )
                in_channels = out_channels
        layers += [
            nn.Conv2d(in_channels, last_channels, 1, bias=False),
            norm_layer(norm, last_channels, groups),
            nn.ReLU6(),
        ]
        self.augment = augmentation_layer(augment)
        self.layers = nn.Sequential(*layers)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(last_channels, outputs)
        init_convolutions(self)
        nn.init.normal_(self.out.weight, std=0.01)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.augment(x)).mean((2, 3))
        return self.out(self.drop(x))  # type: ignore[no-any-return]


def _round_to_8(channels: float) -> int:
    """The multiple of 8 nearest to `channels`, at least 8 and at least 90 % of `channels`.

    >>> _round_to_8(16 * 0.5), _round_to_8(24 * 0.75), _round_to_8(12.1)
    (8, 24, 16)
    """
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
