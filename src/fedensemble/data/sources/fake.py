"""Fake images and text with the shapes of real datasets, so that experiments need no downloads.

They show that the code works at the real shapes. Accuracy on them says nothing about accuracy on
the real data.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...arguments import require_fraction, require_integer
from ..dataset import Dataset, Rows, bad_file_error, data_folder, datasets, make_rng
from ..normalize import Standardise
from .shakespeare import VOCABULARY, cut_windows

OPENIMAGE_SIZES = "fedscale/openimage_client_sizes.npy"
# The sizes of 10,000 OpenImage clients: the smallest, the median, and the standard deviation of the
# logarithm, which follows from the 90th percentile, 1,029.
SMALLEST, MEDIAN, SPREAD = 32, 104, 1.79
COARSE = 4  # the pattern of a class has COARSE x COARSE patches
NOISE = 32.0  # standard deviation of the noise of a pixel, whose value is 0..255
SUCCESSORS = 4  # number of characters that may follow a character


@datasets.register("stand-in-images")
def fake_images(
    *,
    channels: int = 3,
    side: int = 32,
    classes: int = 10,
    n: int = 1000,
    n_test: int = 200,
    groups: int | None = None,
    most: int = 64,
    seed: int = 0,
) -> Dataset:
    """Fake images, uint8 [n, channels, side, side]: a random coarse pattern per class plus noise.

    Args:
        channels: number of channels.
        side: height and width of the images, in pixels.
        classes: number of labels; all are equally frequent, within one image.
        n: number of training images.
        n_test: number of test images; 0 means no test set.
        groups: number of natural clients. If it is given, the sizes of the clients replace `n`.
            They have the distribution of OpenImage's client sizes, and are sampled from the file
            fedscale/openimage_client_sizes.npy of the data folder if it exists.
        most: maximum number of images of a natural client.

    >>> fake_images(channels=1, side=28, n=20, n_test=10).x.shape
    (20, 1, 28, 28)
    """
    owner = "dataset 'stand-in-images'"
    for name, value in (
        ("channels", channels),
        ("side", side),
        ("classes", classes),
        ("n", n),
        ("most", most),
    ):
        require_integer(owner, name, value, minimum=1)
    require_integer(owner, "n_test", n_test)
    rng = make_rng(seed, "stand-in images")
    patterns = rng.integers(64, 192, (classes, channels, COARSE, COARSE))
    group: Rows | None = None
    if groups is not None:
        sizes = np.minimum(
            openimage_sizes(require_integer(owner, "groups", groups, minimum=1), seed), most
        )
        group, n = np.repeat(np.arange(groups), sizes), int(sizes.sum())
    (x, y), (x_test, y_test) = (draw_images(rng, patterns, side, count) for count in (n, n_test))
    info = {"source": "stand-in-images", "files": [], "seed": seed}
    standardise = Standardise(mean=(128.0,), std=(64.0,))
    source = Dataset(x, y, classes=classes, standardise=standardise, group=group, info=info)
    return replace(source, x_test=x_test, y_test=y_test) if n_test else source


def draw_images(
    rng: np.random.Generator, patterns: NDArray[np.int64], side: int, count: int
) -> tuple[NDArray[np.uint8], Rows]:
    """Returns random images [count, channels, side, side] and their classes [count]."""
    y = rng.permutation(np.arange(count) % len(patterns))
    patch = np.arange(side) * COARSE // side  # of each pixel of a row or column
    clean = patterns[y][:, :, patch][:, :, :, patch]
    noisy = clean + NOISE * rng.standard_normal(clean.shape, np.float32)
    return np.clip(noisy, 0, 255).astype(np.uint8), y


def openimage_sizes(count: int, seed: int) -> Rows:
    """Returns the sizes of `count` clients, sampled from the real sizes if their file exists."""
    rng = make_rng(seed, "openimage sizes")
    path = data_folder() / OPENIMAGE_SIZES
    sizes: Rows = np.maximum(MEDIAN * np.exp(SPREAD * rng.standard_normal(count)), SMALLEST).astype(
        np.int64
    )
    if path.is_file():
        try:
            sizes = rng.choice(np.load(path, allow_pickle=False).astype(np.int64), count)
        except (OSError, ValueError) as error:
            raise bad_file_error(path, f"it cannot be read ({error})") from None
    return sizes


@datasets.register("stand-in-text")
def fake_text(
    *,
    roles: int = 20,
    characters: int = 1000,
    sequence: int = 80,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Fake text with the vocabulary of `shakespeare`; each character has four possible successors.

    Args:
        roles: number of natural clients.
        characters: length of the text of each client.
        sequence, test_fraction: as for `shakespeare`.
    """
    owner = "dataset 'stand-in-text'"
    roles, sequence = (
        require_integer(owner, "roles", roles, minimum=1),
        require_integer(owner, "sequence", sequence, minimum=1),
    )
    characters = require_integer(owner, "characters", characters, minimum=2 * sequence + 2)
    cut = characters - round(require_fraction(owner, "test_fraction", test_fraction) * characters)
    rng = make_rng(seed, "stand-in text")
    successors = rng.integers(1, len(VOCABULARY), (len(VOCABULARY), SUCCESSORS))
    choices = rng.integers(SUCCESSORS, size=(characters, roles))
    text = np.zeros((characters, roles), np.int64)
    for position in range(1, characters):
        text[position] = successors[text[position - 1], choices[position]]
    train = [cut_windows(text[:cut, role], sequence) for role in range(roles)]
    held_out = [cut_windows(text[cut:, role], sequence) for role in range(roles)]
    test = np.concatenate(held_out)
    rows = np.concatenate(train)
    info = {"source": "stand-in-text", "files": [], "seed": seed}
    group = np.repeat(np.arange(roles), [len(windows) for windows in train])
    source = Dataset(rows[:, :-1], rows[:, 1:], classes=len(VOCABULARY), group=group, info=info)
    if not len(test):
        return source
    test_group = np.repeat(np.arange(roles), [len(windows) for windows in held_out])
    return replace(source, x_test=test[:, :-1], y_test=test[:, 1:], test_group=test_group)
