"""ShuffleNetV2."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from .augment import augmentation_layer
from .layers import Norm, check_images, norm_layer
from .registry import models

# Table 5 of the paper: channels of the three stages and of the last convolution, for each width.
_CHANNELS = {
    0.5: (48, 96, 192, 1024),
    1.0: (116, 232, 464, 1024),
    1.5: (176, 352, 704, 1024),
    2.0: (244, 488, 976, 2048),
}
_STEM, _BLOCKS = 24, (4, 8, 4)


class Block(nn.Module):
    """A ShuffleNetV2 block: one half of the channels is convolved, then the halves are shuffled.

    The convolved half goes through a 1x1, a 3x3 depthwise and a 1x1 convolution; the other half is
    unchanged. In a block with stride 2 both halves are computed from all channels.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, norm: Norm, groups: int
    ) -> None:
        super().__init__()
        half = out_channels // 2
        self.beside: nn.Module | None = None  # computes the other half in blocks with stride 2
        if stride > 1:
            self.beside = nn.Sequential(
                nn.Conv2d(
                    in_channels, in_channels, 3, stride, padding=1, groups=in_channels, bias=False
                ),
                norm_layer(norm, in_channels, groups),
                nn.Conv2d(in_channels, half, 1, bias=False),
                norm_layer(norm, half, groups),
                nn.ReLU(),
            )
        self.through = nn.Sequential(
            nn.Conv2d(in_channels if stride > 1 else half, half, 1, bias=False),
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
        return shuffle_channels(torch.cat((left, self.through(right)), dim=1))


@models.register("shufflenet")
class ShuffleNet(nn.Module):
    """ShuffleNetV2 for small images.

    A 3x3 convolution, three stages of 4, 8 and 4 blocks, a 1x1 convolution, the mean over pixels
    and a linear layer. 1,263,854 parameters for 3 channels and 10 classes at width 1 (2,278,604 for
    1000, as in torchvision), with either norm. Initialization is torch's default, as in
    torchvision.

    Reference: Ma, Zhang, Zheng and Sun, "ShuffleNet V2: practical guidelines for efficient CNN
    architecture design", ECCV 2018.

    Args:
        shape: (channels, height, width) of one image.
        outputs: number of classes.
        width: 0.5, 1.0, 1.5 or 2.0, the sizes of the paper.
        norm: "batch" or "group".
        groups: number of groups of GroupNorm.
        stem_stride: downsampling factor of the stem; the stages downsample by another factor of 8.
            With 1, a 32x32 image ends as 4x4 pixels; 2 is a convolution with stride 2; 4 adds
            max-pooling, as in the paper.
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
        augment: bool = False,
    ) -> None:
        super().__init__()
        check_images("shufflenet", shape)
        if width not in _CHANNELS:
            raise InputError(
                f"Model 'shufflenet' needs width {', '.join(map(str, _CHANNELS))}; got {width}."
            )
        if stem_stride not in (1, 2, 4):
            raise InputError(f"Model 'shufflenet' needs stem_stride 1, 2 or 4; got {stem_stride}.")
        *stages, last = _CHANNELS[width]
        self.augment = augmentation_layer(augment)
        self.stem = nn.Conv2d(shape[0], _STEM, 3, min(stem_stride, 2), padding=1, bias=False)
        self.stem_norm = norm_layer(norm, _STEM, groups)
        self.pool = nn.MaxPool2d(3, 2, padding=1) if stem_stride == 4 else nn.Identity()
        blocks, in_channels = [], _STEM
        for out_channels, count in zip(stages, _BLOCKS, strict=True):
            blocks.append(Block(in_channels, out_channels, 2, norm, groups))
            blocks += [Block(out_channels, out_channels, 1, norm, groups) for _ in range(count - 1)]
            in_channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Conv2d(in_channels, last, 1, bias=False)
        self.last_norm = norm_layer(norm, last, groups)
        self.out = nn.Linear(last, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.stem_norm(self.stem(self.augment(x)))))
        x = F.relu(self.last_norm(self.last(self.blocks(x))))
        return self.out(x.mean((2, 3)))  # type: ignore[no-any-return]


def shuffle_channels(x: Tensor) -> Tensor:
    """Feature maps [B, C, H, W] with the channels of their two halves interleaved.

    >>> shuffle_channels(torch.arange(6.0).reshape(1, 6, 1, 1)).flatten().tolist()
    [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    """
    halves = x.reshape(x.shape[0], 2, -1, *x.shape[2:])
    return halves.transpose(1, 2).reshape(x.shape)
