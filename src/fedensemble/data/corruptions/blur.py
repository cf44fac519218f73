"""Blur: defocus, frosted glass, motion and zoom."""

import numpy as np
import scipy  # loads scipy.ndimage when it is used, which takes a quarter of a second
from numpy.typing import NDArray

from .warp import motion_kernel, zoom_center

Images = NDArray[np.float64]


def defocus_blur(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Averages over a disk, the image of a point that is out of focus."""
    radius, softness = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[severity]
    blurred: Images = scipy.ndimage.correlate(
        x, soft_disk(radius, softness)[None, None], mode="mirror"
    )
    return blurred


def soft_disk(radius: float, softness: float) -> NDArray[np.float64]:
    """Returns the weights of a disk with a soft edge; their sum is 1.

    Args:
        radius: in pixels.
        softness: standard deviation of the Gaussian over 3x3 pixels that smooths the edge.
    """
    reach = int(radius) + 1
    row, column = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disk = (row**2 + column**2 <= radius**2).astype(np.float64)
    side = np.exp(-1 / (2 * softness**2))
    weights = np.array([side, 1, side]) / (1 + 2 * side)
    for axis in (0, 1):
        disk = scipy.ndimage.correlate1d(disk, weights, axis=axis, mode="constant")
    normalized: NDArray[np.float64] = disk / disk.sum()
    return normalized


def glass_blur(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Replaces pixels by neighbors at random, between two Gaussian blurs."""
    sigma, passes = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity]
    x = _gaussian(x, sigma)
    n, _, height, width = x.shape
    image = np.arange(n)[:, None, None]
    rows, columns = np.arange(2, height)[:, None], np.arange(2, width)
    # The reference implementation means to exchange two pixels, but copies one of them: the one at
    # the same place or one pixel before it in either direction. The images of CIFAR10-C are so.
    for _ in range(passes):
        dx, dy = rng.integers(-1, 1, (2, n, height - 2, width - 2))
        last = np.moveaxis(x, 1, -1)
        x[:, :, 2:, 2:] = np.moveaxis(last[image, rows + dy, columns + dx], -1, 1)
    return _gaussian(x, sigma)


def _gaussian(x: Images, sigma: float) -> Images:
    blurred: Images = scipy.ndimage.gaussian_filter(x, (0, 0, sigma, sigma), mode="nearest")
    return blurred


def motion_blur(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Averages along a line in a random direction up to 45 degrees from the horizontal."""
    radius, sigma = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[severity]
    return motion_kernel(x, radius, sigma, rng.uniform(-45, 45, len(x)))


def zoom_blur(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Averages enlarged images, as if the camera moved towards the object."""
    steps = (6, 11, 16, 21, 26)[severity]
    enlarged = sum((zoom_center(x, 1 + 0.01 * step) for step in range(steps)), np.zeros_like(x))
    return (x + enlarged) / (steps + 1)
