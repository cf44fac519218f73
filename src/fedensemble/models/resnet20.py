"""ResNet-20, the smallest of the residual networks for CIFAR."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from .argument_checks import check_dropout
from .augment import augmentation_layer
from .layers import Norm, check_images, init_convolutions, norm_layer
from .registry import models


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters.

    If the shape changes, the shortcut takes every second pixel and adds channels of zeros (option A
    of the paper).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        norm: Norm,
        groups: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.first_norm = norm_layer(norm, out_channels, groups)
        # Not a layer with p = 0, which would cost a pass over the activations.
        self.drop = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.second = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.second_norm = norm_layer(norm, out_channels, groups)
        self.stride, self.extra_channels = stride, out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(self.drop(y)))
        if self.extra_channels:
            # Max-pooling with 1x1 windows equals x[:, :, ::stride, ::stride]. Unlike the slice, its
            # backward pass returns gradients in the memory format of the convolutions.
            x = F.pad(F.max_pool2d(x, 1, self.stride), (0, 0, 0, 0, 0, self.extra_channels))
        return F.relu(y + x)


@models.register("resnet20")
class ResNet20(nn.Module):
    """ResNet-20 for CIFAR.

    A 3x3 convolution, three stages of three blocks with 16, 32 and 64 channels, the mean over
    pixels and a linear layer. 269,722 parameters for 3 channels and 10 classes, with either norm;
    0.27 million in the paper.

    Reference: He, Zhang, Ren and Sun, "Deep residual learning for image recognition", CVPR 2016,
    section 4.2.

    Args:
        shape: (channels, height, width) of one image.
        outputs: number of classes.
        norm: "batch", as in the paper, or "group".
        groups: number of groups of GroupNorm.
        width: number of channels of the first stage; the others have 2 and 4 times as many.
        augment: random crops and flips of training images, see `PadCropFlip`; also of test images
            if prediction keeps dropout active.
        dropout: probability of dropout between the two convolutions of each block, as in wide
            residual networks (Zagoruyko and Komodakis 2016); None for no dropout.
    """

    def __init__(
        self,
        shape: Sequence[int],
        outputs: int,
        norm: Norm = "batch",
        groups: int = 2,
        width: int = 16,
        augment: bool = False,
        # None, not 0: options that are None are not hashed, so that runs of versions without this
        # option keep their hash.
        dropout: float | None = None,
    ) -> None:
        super().__init__()
        check_images("resnet20", shape, width=width)
        dropout = 0.0 if dropout is None else dropout
        check_dropout("resnet20", dropout)
        self.augment = augmentation_layer(augment)
        self.stem = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
        self.stem_norm = norm_layer(norm, width, groups)
        blocks: list[nn.Module] = []
        in_channels = width
        for out_channels in (width, 2 * width, 4 * width):
            for _ in range(3):
                stride = 1 if out_channels == in_channels else 2
                blocks.append(Block(in_channels, out_channels, stride, norm, groups, dropout))
                in_channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.out = nn.Linear(in_channels, outputs)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(self.augment(x))))
        return self.out(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]
