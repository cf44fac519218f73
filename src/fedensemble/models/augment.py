"""Augmentation as a model's first layer: it runs where the model runs, with the model's keyed
randomness.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError


class PadCropFlip(nn.Module):
    """In training, each image moved by up to `pad` pixels and mirrored with probability 1/2; in
    eval, the same images.

    The usual augmentation for CIFAR (He et al. 2016, section 4.2): pad with zeros on all sides,
    crop a window of the image's own size, flip. Zeros are the mean colour here, for a model's
    inputs are standardised; code that pads before it standardises has black borders.

    Prediction with `dropout=True` runs everything but BatchNorm in training mode, as the authors'
    code tested: then test images are cropped and flipped too.

    Args:
        pad: pixels, on each side.

    >>> image = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> bool((PadCropFlip().eval()(image) == image).all()), PadCropFlip()(image).shape
    (True, torch.Size([1, 1, 2, 2]))
    """

    def __init__(self, pad: int = 4) -> None:
        super().__init__()
        if pad < 0:
            raise InputError(f"PadCropFlip needs pad >= 0; got {pad}.")
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        channels, height, width = x.shape[1:]
        # one number an image: batches folded together still draw each their own
        an_image = x[:, 0, 0, 0]
        top, left = (self._offset(torch.rand_like(an_image)).unsqueeze(1) for _ in range(2))
        mirrored = (torch.rand_like(an_image) < 0.5).unsqueeze(1)
        column = torch.arange(width, device=x.device)
        rows = torch.arange(height, device=x.device) + top  # [B, H]
        columns = torch.where(mirrored, width - 1 - column, column) + left  # [B, W]
        # [B, H, W] in the padded image
        places = rows.unsqueeze(2) * (width + 2 * self.pad) + columns.unsqueeze(1)
        padded = F.pad(x, (self.pad,) * 4).flatten(2)
        index = places.flatten(1).unsqueeze(1).expand(-1, channels, -1)
        return padded.gather(2, index).reshape(x.shape)

    def _offset(self, drawn: Tensor) -> Tensor:
        """0 .. 2 * pad for numbers in [0, 1]; a number just below one may have been rounded up to
        it.
        """
        return (drawn * (2 * self.pad + 1)).long().clamp(max=2 * self.pad)

    def extra_repr(self) -> str:
        return f"pad={self.pad}"


def first_layer(augment: bool) -> nn.Module:
    """PadCropFlip, or nothing."""
    return PadCropFlip() if augment else nn.Identity()
