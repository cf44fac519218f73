"""MobileNetV2."""

from collections.abc import Sequence

from torch import Tensor, nn

from .argument_checks import check_dropout
from .augment import first_layer
from .layers import Norm, check_images, initialise_convolutions, norm_layer
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
    """Inverted residual: 1x1 convolution to more channels, 3x3 on each channel, 1x1 back, with no
    ReLU at the end.
    """

    def __init__(
        self, inside: int, outside: int, expansion: int, stride: int, norm: Norm, groups: int
    ) -> None:
        super().__init__()
        wide = expansion * inside
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [
                nn.Conv2d(inside, wide, 1, bias=False),
                norm_layer(norm, wide, groups),
                nn.ReLU6(),
            ]
        layers += [
            nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False),
            norm_layer(norm, wide, groups),
            nn.ReLU6(),
            nn.Conv2d(wide, outside, 1, bias=False),
            norm_layer(norm, outside, groups),
        ]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.residual else y


@models.register("mobilenet")
class MobileNet(nn.Module):
    """MobileNetV2: a 3x3 convolution, 17 inverted residuals, a 1x1 convolution, mean over pixels,
    linear layer.

    2,236,682 parameters for 3 channels and 10 classes at width 1 (3,504,872 for 1000, as in
    torchvision), with either norm. Initialised as in torchvision.

    Reference: Sandler, Howard, Zhu, Zhmoginov and Chen, "MobileNetV2: inverted residuals and linear
    bottlenecks", CVPR 2018.

    Args:
        shape: (channels, height, width) of one image.
        outputs: number of classes.
        width: factor for the numbers of channels, rounded to multiples of 8.
        norm: "batch" or "group".
        groups: of GroupNorm.
        stem_stride: of the first convolution; the blocks shrink an image 16 times more. 1 leaves
            2x2 pixels of 32x32 and 4x4 of 64x64; 2, as in the paper, is for larger images.
        dropout: probability, before the linear layer.
        augment: random crops and flips of training images, see `PadCropFlip`; also of test images
            where prediction keeps dropout active.
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
        inside, last = _by_eight(_STEM * width), _by_eight(_LAST * max(1.0, width))
        layers: list[nn.Module] = [
            nn.Conv2d(shape[0], inside, 3, stem_stride, padding=1, bias=False),
            norm_layer(norm, inside, groups),
            nn.ReLU6(),
        ]
        for expansion, channels, count, stride in _STAGES:
            outside = _by_eight(channels * width)
            for place in range(count):
                layers.append(
                    Block(inside, outside, expansion, stride if place == 0 else 1, norm, groups)
                )
                inside = outside
        layers += [
            nn.Conv2d(inside, last, 1, bias=False),
            norm_layer(norm, last, groups),
            nn.ReLU6(),
        ]
        self.augment = first_layer(augment)
        self.layers = nn.Sequential(*layers)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(last, outputs)
        initialise_convolutions(self)
        nn.init.normal_(self.out.weight, std=0.01)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.augment(x)).mean((2, 3))
        return self.out(self.drop(x))  # type: ignore[no-any-return]


def _by_eight(channels: float) -> int:
    """The nearest multiple of 8, but at least 8 and not below 90 % of what was asked for.

    >>> _by_eight(16 * 0.5), _by_eight(24 * 0.75), _by_eight(12.1)
    (8, 24, 16)
    """
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
