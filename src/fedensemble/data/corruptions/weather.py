"""Weather: snow and fog."""

import numpy as np
from numpy.typing import NDArray

from .warp import motion_kernel, zoom_center

Images = NDArray[np.float64]
LUMA = np.array([0.299, 0.587, 0.114]).reshape(1, 3, 1, 1)  # weights of red, green, blue (BT.601)


def snow(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Adds flakes that are blurred in the direction of their fall, and whitens the image."""
    mean, deviation, zoom, threshold, radius, sigma, kept = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity]
    n, channels, height, width = x.shape
    flakes = zoom_center(rng.normal(mean, deviation, (n, 1, height, width)), zoom)
    flakes = np.clip(np.where(flakes < threshold, 0, flakes), 0, 1)
    flakes = motion_kernel(flakes, radius, sigma, rng.uniform(-135, -45, (n,)))
    gray = (x * LUMA).sum(1, keepdims=True) if channels == len(LUMA.ravel()) else x
    whiter = kept * x + (1 - kept) * np.maximum(x, gray * 1.5 + 0.5)
    # The same flakes once more, turned by 180 degrees.
    return whiter + flakes + flakes[:, :, ::-1, ::-1]


def fog(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Adds clouds, and darkens the sum to the brightness of the image."""
    strength, decay = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))[severity]
    n, _, height, width = x.shape
    brightest = x.max((1, 2, 3), keepdims=True)
    clouds = plasma_fractal(n, max(height, width), decay, rng)[:, None, :height, :width]
    foggy: Images = (x + strength * clouds) * brightest / (brightest + strength)
    return foggy


def plasma_fractal(
    n: int, side: int, decay: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Returns n random height maps in 0..1 by the diamond-square algorithm.

    Args:
        n: number of maps.
        side: their side at least; they have the next power of two.
        decay: factor by which the random change shrinks when the grid is refined.
    """
    size = 1 << (side - 1).bit_length()
    heights = np.zeros((n, size, size))
    step, change = size, 100.0

    def mean(total: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of four neighbors, from their sum, and a random change."""
        return total / 4 + change * rng.uniform(-change, change, total.shape)

    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        total = corners + np.roll(corners, -1, 1)
        heights[:, half::step, half::step] = mean(total + np.roll(total, -1, 2))
        centers = heights[:, half::step, half::step]
        left_right = corners + np.roll(corners, -1, 2)
        above_below = centers + np.roll(centers, 1, 1)
        heights[:, ::step, half::step] = mean(left_right + above_below)
        left_right = centers + np.roll(centers, 1, 2)
        above_below = corners + np.roll(corners, -1, 1)
        heights[:, half::step, ::step] = mean(left_right + above_below)
        step, change = half, change / decay
    heights -= heights.min((1, 2), keepdims=True)
    scaled: NDArray[np.float64] = heights / heights.max((1, 2), keepdims=True)
    return scaled
