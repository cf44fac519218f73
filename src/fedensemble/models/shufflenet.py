"""ShuffleNetV2."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from .augment import first_layer
from .layers import Norm, check_images, norm_layer
from .registry import models

# Table 5 of the paper: channels of the three stages and of the last convolution, by width.
_CHANNELS = {
    0.5: (48, 96, 192, 1024),
    1.0: (116, 232, 464, 1024),
    1.5: (176, 352, 704, 1024),
    2.0: (244, 488, 976, 2048),
}
_STEM, _BLOCKS = 24, (4, 8, 4)


class Block(nn.Module):
    """Half of the channels pass by, half go through 1x1, 3x3 on each channel and 1x1; then the
    halves are shuffled.

    Where the image shrinks, both halves are made from all channels.
    """

    def __init__(self, inside: int, outside: int, stride: int, norm: Norm, groups: int) -> None:
        super().__init__()
        half = outside // 2
        self.beside: nn.Module | None = None
        if stride > 1:
            self.beside = nn.Sequential(
                nn.Conv2d(inside, inside, 3, stride, padding=1, groups=inside, bias=False),
                norm_layer(norm, inside, groups),
                nn.Conv2d(inside, half, 1, bias=False),
                norm_layer(norm, half, groups),
                nn.ReLU(),
            )
        self.through = nn.Sequential(
            nn.Conv2d(inside if stride > 1 else half, half, 1, bias=False),
            norm_layer(norm, half, groups),
            nn.ReLU(),
            nn.Conv2d(half, half, 3, stride, padding=1, groups=half, bias=False),
            norm_layer(norm, half, groups),
            nn.Conv2d(half, half, 1, bias=False),
            norm_layer(norm, half, groups),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.beside is None:
            left, right = x.chunk(2, dim=1)
        else:
            left, right = self.beside(x), x
        return shuffled(torch.cat((left, self.through(right)), dim=1))


@models.register("shufflenet")
class ShuffleNet(nn.Module):
    """ShuffleNetV2: a 3x3 convolution, three stages of 4, 8 and 4 blocks, a 1x1 convolution, mean,
    linear layer.

    1,263,854 parameters for 3 channels and 10 classes at width 1 (2,278,604 for 1000, as in
    torchvision), with either norm. Initialised by torch's defaults, as in torchvision.

    Reference: Ma, Zhang, Zheng and Sun, "ShuffleNet V2: practical guidelines for efficient CNN
    architecture design", ECCV 2018.

    Args:
        shape: (channels, height, width) of one image.
        outputs: number of classes.
        width: 0.5, 1.0, 1.5 or 2.0, the sizes of the paper.
        norm: "batch" or "group".
        groups: of GroupNorm.
        stem_stride: how many times the stem shrinks an image; the stages shrink it 8 times more. 1
            leaves 4x4 pixels of 32x32; 2 is a convolution with stride 2; 4 has max-pooling after
            it, as in the paper.
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
        augment: bool = False,
    ) -> None:
        super().__init__()
        check_images("shufflenet", shape)
        if width not in _CHANNELS:
            raise InputError(
                f"Model 'shufflenet' has widths {', '.join(map(str, _CHANNELS))}; got {width}."
            )
        if stem_stride not in (1, 2, 4):
            raise InputError(f"Model 'shufflenet' has stem_stride 1, 2 or 4; got {stem_stride}.")
        *stages, last = _CHANNELS[width]
        self.augment = first_layer(augment)
        self.stem = nn.Conv2d(shape[0], _STEM, 3, min(stem_stride, 2), padding=1, bias=False)
        self.stem_norm = norm_layer(norm, _STEM, groups)
        self.pool = nn.MaxPool2d(3, 2, padding=1) if stem_stride == 4 else nn.Identity()
        blocks, inside = [], _STEM
        for outside, count in zip(stages, _BLOCKS, strict=True):
            blocks.append(Block(inside, outside, 2, norm, groups))
            blocks += [Block(outside, outside, 1, norm, groups) for _ in range(count - 1)]
            inside = outside
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Conv2d(inside, last, 1, bias=False)
        self.last_norm = norm_layer(norm, last, groups)
        self.out = nn.Linear(last, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.stem_norm(self.stem(self.augment(x)))))
        x = F.relu(self.last_norm(self.last(self.blocks(x))))
        return self.out(x.mean((2, 3)))  # type: ignore[no-any-return]


def shuffled(x: Tensor) -> Tensor:
    """Images [B, C, H, W] with the channels of their two halves in turn.

    >>> shuffled(torch.arange(6.0).reshape(1, 6, 1, 1)).flatten().tolist()
    [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    """
    halves = x.reshape(len(x), 2, -1, *x.shape[2:])
    return halves.transpose(1, 2).reshape(x.shape)
