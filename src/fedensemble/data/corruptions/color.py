"""Changes of brightness and contrast."""

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.float64]


def brightness(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Adds to the value of HSV, the largest channel; hue and saturation are kept."""
    added = (0.05, 0.1, 0.15, 0.2, 0.3)[severity]
    value = x.max(1, keepdims=True)
    brighter = np.minimum(value + added, 1)
    # With constant hue and saturation, all channels are proportional to the value. Black has no
    # hue, and becomes gray.
    changed: Images = np.where(value > 0, x * brighter / np.where(value > 0, value, 1), brighter)
    return changed


def contrast(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Moves all values towards the mean of their image and channel."""
    factor = (0.75, 0.5, 0.4, 0.3, 0.15)[severity]
    mean = x.mean((2, 3), keepdims=True)
    changed: Images = (x - mean) * factor + mean
    return changed
