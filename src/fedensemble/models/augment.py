"""Data augmentation as the first layer of a model.

As a layer it runs on the model's device and uses the model's keyed random numbers, so that
augmented images are the same on every engine.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError


class PadCropFlip(nn.Module):
    """Random crops with zero padding and horizontal flips in training; the identity in eval mode.

    The usual augmentation for CIFAR (He et al. 2016, section 4.2): pad with zeros on all sides,
    crop a window of the size of the image, flip with probability 1/2. Zero is the mean color,
    because inputs of a model are normalized; code that pads before normalizing has black borders.

    Prediction with `dropout=True` runs all layers except BatchNorm in training mode, as the test of
    the authors' code does. Test images are then cropped and flipped as well. MC-dropout
    (`dropout_samples`) leaves them as they are.

    Args:
        pad: number of padding pixels on each side.

    >>> image = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> bool((PadCropFlip().eval()(image) == image).all()), PadCropFlip()(image).shape
    (True, torch.Size([1, 1, 2, 2]))
    """

    augments = True  # not active in MC-dropout

    def __init__(self, pad: int = 4) -> None:
        super().__init__()
        if pad < 0:
            raise InputError(f"PadCropFlip needs pad >= 0; got {pad}.")
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        channels, height, width = x.shape[1:]
        # Draw one number per image, with the batch as first dimension. In a stacked forward pass
        # the batch holds the images of many visits, and the numbers are then drawn per visit. A
        # draw without a batch dimension could not be stacked.
        per_image = x[:, 0, 0, 0]
        top, left = (self._to_offset(torch.rand_like(per_image)).unsqueeze(1) for _ in range(2))
        is_flipped = (torch.rand_like(per_image) < 0.5).unsqueeze(1)
        column = torch.arange(width, device=x.device)
        rows = torch.arange(height, device=x.device) + top  # [B, H]
        columns = torch.where(is_flipped, width - 1 - column, column) + left  # [B, W]
        # Indices into the flattened padded image, [B, H, W]. One gather crops and flips all images,
        # without a loop over images or data-dependent control flow.
        pixels = rows.unsqueeze(2) * (width + 2 * self.pad) + columns.unsqueeze(1)
        padded = F.pad(x, (self.pad,) * 4).flatten(2)
        index = pixels.flatten(1).unsqueeze(1).expand(-1, channels, -1)
        return padded.gather(2, index).reshape(x.shape)

    def _to_offset(self, uniform: Tensor) -> Tensor:
        """Integers 0 to 2 * pad, from uniform numbers in [0, 1]."""
        # The clamp is for numbers just below 1 that were rounded up to 1.
        return (uniform * (2 * self.pad + 1)).long().clamp(max=2 * self.pad)

    def extra_repr(self) -> str:
        return f"pad={self.pad}"


def augmentation_layer(augment: bool) -> nn.Module:
    """PadCropFlip if `augment`, else the identity."""
    return PadCropFlip() if augment else nn.Identity()
