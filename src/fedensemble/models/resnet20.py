"""ResNet-20, the smallest of the residual networks made for CIFAR."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from .augment import first_layer
from .layers import Norm, check_images, initialise_convolutions, norm_layer
from .registry import models


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters.

    Where the shape changes, the shortcut takes every second pixel and adds channels of zeros
    (option A of the paper).
    """

    def __init__(self, inside: int, outside: int, stride: int, norm: Norm, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.first_norm = norm_layer(norm, outside, groups)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.second_norm = norm_layer(norm, outside, groups)
        self.stride, self.added = stride, outside - inside

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        if self.added:
            # As x[:, :, ::stride, ::stride], but slopes stay in the order in memory that
            # convolutions have them in.
            x = F.pad(F.max_pool2d(x, 1, self.stride), (0, 0, 0, 0, 0, self.added))
        return F.relu(y + x)


@models.register("resnet20")
class ResNet20(nn.Module):
    """ResNet-20: a 3x3 convolution, three stages of three blocks (16, 32, 64 channels), mean over
    pixels, linear layer.

    269,722 parameters for 3 channels and 10 classes, with either norm; 0.27 million in the paper.

    Reference: He, Zhang, Ren and Sun, "Deep residual learning for image recognition", CVPR 2016,
    section 4.2.

    Args:
        shape: (channels, height, width) of one image.
        outputs: number of classes.
        norm: "batch", as in the paper, or "group".
        groups: of GroupNorm.
        width: channels of the first stage; the others have 2 and 4 times as many.
        augment: random crops and flips of training images, see `PadCropFlip`; also of test images
            where prediction keeps dropout active.
    """

    def __init__(
        self,
        shape: Sequence[int],
        outputs: int,
        norm: Norm = "batch",
        groups: int = 2,
        width: int = 16,
        augment: bool = False,
    ) -> None:
        super().__init__()
        check_images("resnet20", shape, width=width)
        self.augment = first_layer(augment)
        self.stem = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
        self.stem_norm = norm_layer(norm, width, groups)
        blocks, inside = [], width
        for outside in (width, 2 * width, 4 * width):
            blocks.append(Block(inside, outside, 1 if outside == inside else 2, norm, groups))
            blocks += [Block(outside, outside, 1, norm, groups) for _ in range(2)]
            inside = outside
        self.blocks = nn.Sequential(*blocks)
        self.out = nn.Linear(inside, outputs)
        initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(self.augment(x))))
        return self.out(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]
