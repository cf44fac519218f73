"""Corrupts images by the name and the severity of a corruption; repeatable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arguments import require_integer
from ...errors import InputError, unknown
from ..dataset import make_rng
from . import blur, color, digital, noise, weather

# Takes images [n, C, H, W] in 0..1, an index of severity 0..4 and a random generator.
Corruption = Callable[[NDArray[np.float64], int, np.random.Generator], NDArray[np.float64]]

# In the order of the paper: noise, blur, weather, digital.
_FUNCTIONS: dict[str, Corruption] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "fog": weather.fog,
    "brightness": color.brightness,
    "contrast": color.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
}
CORRUPTIONS = tuple(_FUNCTIONS)
# Corruptions of the paper that are not made here, and the reason.
ABSENT = {"frost": "it needs photographs of frost that cannot be generated"}
SEVERITIES = (1, 2, 3, 4, 5)
# Images per random generator. It bounds memory, and changing it changes the random values.
_CHUNK = 500


def corrupt(
    images: NDArray[np.uint8], corruption: str, severity: int, *, image_set: str = "", seed: int = 0
) -> NDArray[np.uint8]:
    """Returns corrupted images, with the dtype and the shape of `images`.

    The result depends on the arguments only.

    Args:
        images: uint8 [n, C, H, W] with C = 1 (gray) or 3 (red, green, blue).
        corruption: one of `CORRUPTIONS`.
        severity: from 1 to 5.
        image_set: name of the images; sets with different names get different random values.
        seed: of the random values.

    >>> gray = np.full((1, 1, 8, 8), 100, np.uint8)
    >>> int(corrupt(gray, "brightness", 2)[0, 0, 0, 0])  # + 0.1 * 255
    126
    """
    check_corruption(corruption)
    if require_integer("corrupt()", "severity", severity, minimum=1) > len(SEVERITIES):
        raise InputError(f"severity is one of 1, 2, 3, 4, 5; got {severity}.")
    check_images(images, "corrupt()")
    parts = []
    for first in range(0, len(images), _CHUNK):
        purpose = f"corruption/{image_set}/{corruption}/{severity}/{first}"
        x = images[first : first + _CHUNK] / 255.0
        parts.append(_as_bytes(_FUNCTIONS[corruption](x, severity - 1, make_rng(seed, purpose))))
    return np.concatenate(parts)


def check_corruption(name: Any) -> None:
    """Raises unless this corruption can be made."""
    if isinstance(name, str) and name in ABSENT:
        raise InputError(f"Corruption '{name}' is not available: {ABSENT[name]}.")
    if not isinstance(name, str) or name not in _FUNCTIONS:
        raise InputError(unknown("corruption", str(name), CORRUPTIONS))


def check_images(images: Any, owner: str) -> None:
    """Raises unless this is an array of gray or RGB images in bytes.

    Args:
        owner: what needs images, at the beginning of the message.
    """
    shape: tuple[int, ...] = tuple(getattr(images, "shape", ()))
    dtype = str(getattr(images, "dtype", type(images).__name__))
    if dtype != "uint8" or len(shape) != 4 or shape[1] not in (1, 3) or not len(images):
        raise InputError(
            f"{owner} needs images as uint8 [n, channels, height, width] with 1 or 3 channels; got "
            f"{dtype.removeprefix('torch.')} of shape {shape}."
        )


def _as_bytes(x: NDArray[np.float64]) -> NDArray[np.uint8]:
    # Rounds, so that an unchanged pixel keeps its value. The files of CIFAR10-C are truncated.
    return np.rint(np.clip(x, 0, 1) * 255).astype(np.uint8)
