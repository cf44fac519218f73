"""Resampling of images: integer shifts, bilinear sampling and zooming into the center."""

import math

import numpy as np
import scipy
from numpy.typing import NDArray

Images = NDArray[np.float64]


def motion_kernel(x: Images, radius: int, sigma: float, angle: NDArray[np.float64]) -> Images:
    """Returns images that are blurred along a line that starts at each pixel, as ImageMagick does.

    The weights are half of a Gaussian. Pixels outside of the image are those of its border.

    Args:
        x: images [n, C, H, W].
        radius: length of the line in pixels; twice as many pixels and one are averaged.
        sigma: standard deviation of the Gaussian in pixels.
        angle: direction of each image in degrees, [n]; 0 is to the right.
    """
    width = 2 * radius + 1
    weights = np.exp(-(np.arange(width) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    down, right = np.sin(np.deg2rad(angle)), np.cos(np.deg2rad(angle))
    result = np.zeros_like(x)
    for step, weight in enumerate(weights):
        if weight < 1e-6:  # the rest of the Gaussian is below one level of gray
            break
        dy, dx = (np.ceil(step * part - 0.5).astype(int) for part in (down, right))
        result += weight * _shift(x, dy, dx)
    return result


def _shift(x: Images, dy: NDArray[np.int64], dx: NDArray[np.int64]) -> Images:
    """Returns image i moved by dy[i] rows and dx[i] columns; the border is repeated."""
    n, _, height, width = x.shape
    rows = np.clip(np.arange(height) + dy[:, None], 0, height - 1)
    columns = np.clip(np.arange(width) + dx[:, None], 0, width - 1)
    images = np.arange(n)[:, None, None]
    moved: Images = np.moveaxis(
        np.moveaxis(x, 1, -1)[images, rows[:, :, None], columns[:, None, :]], -1, 1
    )
    return moved


def zoom_center(x: Images, factor: float) -> Images:
    """Returns the middle of the images [..., H, W] enlarged to their size, by linear interpolation.

    Rows and columns are interpolated by one matrix each, which is faster than `ndimage.zoom` of all
    images and gives the same result.
    """
    return _zoom_matrix(x.shape[-2], factor) @ x @ _zoom_matrix(x.shape[-1], factor).T


def _zoom_matrix(size: int, factor: float) -> NDArray[np.float64]:
    """Returns the matrix that enlarges the middle of a row of `size` pixels to `size` pixels."""
    kept = math.ceil(size / factor)
    first = (size - kept) // 2
    enlarged = scipy.ndimage.zoom(np.eye(kept), (factor, 1), order=1)
    extra = (len(enlarged) - size) // 2
    matrix = np.zeros((size, size))
    matrix[:, first : first + kept] = enlarged[extra : extra + size]
    return matrix


def sample(x: Images, rows: NDArray[np.float64], columns: NDArray[np.float64]) -> Images:
    """Returns the bilinear interpolation of images [n, C, H, W] at positions [n, H, W].

    Positions outside are reflected at the border pixels.
    """
    n, _, height, width = x.shape
    rows, columns = _reflect(rows, height), _reflect(columns, width)
    top = np.minimum(rows.astype(int), height - 2)
    left = np.minimum(columns.astype(int), width - 2)
    down, right = (rows - top)[..., None], (columns - left)[..., None]
    last, image = np.moveaxis(x, 1, -1), np.arange(n)[:, None, None]
    upper = last[image, top, left] * (1 - right) + last[image, top, left + 1] * right
    lower = last[image, top + 1, left] * (1 - right) + last[image, top + 1, left + 1] * right
    sampled: Images = np.moveaxis(upper * (1 - down) + lower * down, -1, 1)
    return sampled


def _reflect(position: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Returns positions reflected into [0, size - 1]."""
    last = size - 1
    reflected: NDArray[np.float64] = last - np.abs(position % (2 * last) - last)
    return reflected
