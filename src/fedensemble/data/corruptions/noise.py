"""Noise per pixel and channel: Gaussian, shot and impulse noise."""

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.float64]


def gaussian_noise(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Adds normal noise."""
    deviation = (0.04, 0.06, 0.08, 0.09, 0.10)[severity]
    return x + rng.normal(scale=deviation, size=x.shape)


def shot_noise(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Draws each value from a Poisson distribution: noise of a camera with little light."""
    photons = (500, 250, 100, 75, 50)[severity]  # of a white pixel
    return rng.poisson(x * photons) / photons


def impulse_noise(x: Images, severity: int, rng: np.random.Generator) -> Images:
    """Salt and pepper: sets a share of the values to 0 or 1."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity]
    replaced = rng.random(x.shape) < share
    return np.where(replaced, rng.integers(0, 2, x.shape), x)
