"""ResNet-18 for small images."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from .augment import augmentation_layer
from .layers import Norm, check_images, init_convolutions, norm_layer
from .registry import models


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, norm: Norm, groups: int
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.first_norm = norm_layer(norm, out_channels, groups)
        self.second = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.second_norm = norm_layer(norm, out_channels, groups)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                norm_layer(norm, out_channels, groups),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


@models.register("resnet18")
class ResNet18(nn.Module):
    """ResNet-18 with a stem for small images: one 3x3 convolution, no max-pooling.

    Four stages of two blocks with 64, 128, 256 and 512 channels, then the mean over pixels and a
    linear layer. 11,173,962 parameters for 3 channels and 10 classes, with either norm.
    Convolutions are initialized as in torchvision.

    Reference: He, Zhang, Ren and Sun, "Deep residual learning for image recognition", CVPR 2016.
    With norm="group" it is the federated version, GroupNorm with two groups, of Reddi et al.,
    "Adaptive federated optimization", ICLR 2021.

    Args:
        shape: (channels, height, width) of one image.
        outputs: number of classes.
        norm: "batch" or "group"; GroupNorm has no running statistics, which differ between clients
            with different data.
        groups: number of groups of GroupNorm.
        width: number of channels of the first stage; the others have 2, 4 and 8 times as many.
        augment: random crops and flips of training images, see `PadCropFlip`; also of test images
            if prediction keeps dropout active.
    """

    def __init__(
        self,
        shape: Sequence[int],
        outputs: int,
        norm: Norm = "batch",
        groups: int = 2,
        width: int = 64,
        augment: bool = False,
    ) -> None:
        super().__init__()
        check_images("resnet18", shape, width=width)
        self.augment = augmentation_layer(augment)
        self.stem = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
        self.stem_norm = norm_layer(norm, width, groups)
        blocks, in_channels = [], width
        for stage in range(4):
            out_channels = width * 2**stage
            blocks.append(Block(in_channels, out_channels, 1 if stage == 0 else 2, norm, groups))
            blocks.append(Block(out_channels, out_channels, 1, norm, groups))
            in_channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.out = nn.Linear(in_channels, outputs)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(self.augment(x))))
        return self.out(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]
