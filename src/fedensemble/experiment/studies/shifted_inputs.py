"""Images that a run was not trained for: those of other data, and corrupted test images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...config.build import load_source
from ...data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from ...errors import DataError, InputError

_LUMA = (0.299, 0.587, 0.114)  # weights of red, green, blue (BT.601)


class Corrupted(NamedTuple):
    """Test images under one corruption, the severities one after the other, and their labels."""

    images: Tensor  # uint8 [severities * n, C, H, W]
    labels: Tensor  # [n]


def other_images(
    source: str, options: Mapping[str, Any], shape: Sequence[int], most: int
) -> Tensor:
    """Test images of other data in the shape of a run's inputs, uint8 [n, C, H, W].

    Args:
        source: registered name of the data.
        options: of the data.
        shape: (channels, height, width) of the run's inputs.
        most: number of images; if there are more, the first ones are taken.
    """
    images = load_source(source, options).x_test
    if images is None:
        raise DataError(f"Dataset '{source}' has no test set to detect as out of distribution.")
    if images.dtype != np.uint8 or images.ndim != 4 or len(shape) != 3:
        raise InputError(
            f"Only images in bytes can be given another shape: '{source}' has inputs "
            f"{images.dtype} of shape {images.shape[1:]}, and the run takes {tuple(shape)}."
        )
    return reshape_images(torch.from_numpy(np.ascontiguousarray(images[:most])), shape)


def reshape_images(images: Tensor, shape: Sequence[int]) -> Tensor:
    """Images in bytes with other numbers of channels and pixels, uint8 [n, *shape].

    Colors become gray by their brightness (BT.601), gray becomes three equal channels, and sizes
    change by bilinear interpolation with a filter against aliasing.

    >>> reshape_images(torch.full((1, 1, 4, 4), 7, dtype=torch.uint8), (3, 2, 2)).unique().tolist()
    [7]
    """
    channels, height, width = shape
    values = images.float()
    if channels != values.shape[1]:
        if {channels, values.shape[1]} != {1, 3}:
            raise InputError(
                f"Images have 1 or 3 channels; got {values.shape[1]} for a run with {channels}."
            )
        gray = torch.tensor(_LUMA).reshape(1, 3, 1, 1)
        values = (
            (values * gray).sum(1, keepdim=True)
            if channels == 1
            else values.expand(-1, channels, -1, -1)
        )
    if (height, width) != tuple(values.shape[2:]):
        values = F.interpolate(values, (height, width), mode="bilinear", antialias=True)
    return values.round().clamp(0, 255).to(torch.uint8)


def corrupted_images(
    images: NDArray[np.uint8], labels: Tensor, image_set: str
) -> dict[str, Corrupted]:
    """The images under each corruption, at all severities.

    Args:
        images: uint8 [n, C, H, W].
        labels: [n].
        image_set: name of the images, which their random values depend on.
    """
    found = {}
    for name in CORRUPTIONS:
        made = [corrupt(images, name, level, image_set=image_set) for level in SEVERITIES]
        found[name] = Corrupted(torch.from_numpy(np.concatenate(made)), labels)
    return found
