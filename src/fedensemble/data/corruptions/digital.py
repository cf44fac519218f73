"""Elastic deformation, pixelation and JPEG compression."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from .warp import sample

Images = NDArray[np.float64]


def elastic_transform(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Moves three points of the image, and then each pixel by a smooth random field.

    Severity 1 has no random field; the later ones have stronger and rougher fields, and move the
    three points less.
    """
    n, _, height, width = x.shape
    strength, smoothness, jitter = (
        min(height, width) * np.array(constants)
        for constants in zip(
            (0, 0, 0.08),
            (0.05, 0.2, 0.07),
            (0.08, 0.06, 0.06),
            (0.1, 0.04, 0.05),
            (0.1, 0.03, 0.03),
            strict=True,
        )
    )
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    x = sample(x, *_affine_positions(rows, columns, jitter[severity], n, rng))
    if not strength[severity]:
        return x
    moves = rng.uniform(-1, 1, (2, n, height, width))
    sigma = smoothness[severity]
    right, down = strength[severity] * scipy.ndimage.gaussian_filter(
        moves, (0, 0, sigma, sigma), mode="reflect", truncate=3
    )
    return sample(x, rows + down, columns + right)


def _affine_positions(
    rows: Images, columns: Images, jitter: float, n: int, rng: np.random.Generator
) -> tuple[Images, Images]:
    """Returns where the pixels [n, H, W] come from if three points of each image are moved.

    Args:
        jitter: how far the points are moved at most, horizontally and vertically.
    """
    height, width = rows.shape
    middle, reach = np.array([height // 2, width // 2]), min(height, width) // 3
    corners = middle + reach * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = corners + rng.uniform(-jitter, jitter, (n, 3, 2))
    # The affine map of each image takes the moved points back: [moved, 1] @ map = corners.
    equations = np.concatenate([moved, np.ones((n, 3, 1))], 2)
    maps = np.linalg.solve(equations, np.broadcast_to(corners, (n, 3, 2)).astype(np.float64))
    pixels = np.stack([rows.ravel(), columns.ravel(), np.ones(rows.size)], 1)
    origin = (pixels @ maps).reshape(n, height, width, 2)
    return origin[..., 0], origin[..., 1]


def pixelate(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Shrinks the image by averaging, and enlarges it by repeating pixels."""
    from PIL import Image

    share = (0.95, 0.9, 0.85, 0.75, 0.65)[severity]

    def resize(image: Any) -> Any:
        size = image.size
        small = image.resize(tuple(int(side * share) for side in size), Image.Resampling.BOX)
        return small.resize(size, Image.Resampling.BOX)

    return _by_image(x, resize)


def jpeg_compression(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Stores the image as JPEG of low quality."""
    from PIL import Image

    quality = (80, 65, 58, 50, 40)[severity]

    def compress(image: Any) -> Any:
        file = BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return _by_image(x, compress)


def _by_image(x: Images, change: Callable[[Any], Any]) -> Images:
    """Returns the images [n, C, H, W] after a function of Pillow images."""
    from PIL import Image

    pixels = np.rint(x * 255).astype(np.uint8)
    if x.shape[1] == 1:
        changed = np.stack([np.asarray(change(Image.fromarray(each[0]))) for each in pixels])
        return changed[:, None] / 255.0
    last = np.ascontiguousarray(np.moveaxis(pixels, 1, -1))
    changed = np.stack([np.asarray(change(Image.fromarray(each))) for each in last])
    return np.moveaxis(changed, -1, 1) / 255.0
