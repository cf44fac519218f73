"""Stand-ins: made-up images and text of the shape of real datasets, so that every experiment runs
without downloads.

They say that the machinery works at the real shapes; they say nothing of accuracy on the real data.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..arguments import fraction, whole
from .dataset import Rows, Source, bad_file, data_folder, generator, sources
from .normalize import Standardise
from .shakespeare import VOCABULARY, cut_windows

OPENIMAGE_SIZES = "fedscale/openimage_client_sizes.npy"
# Of 10,000 OpenImage clients: smallest, median, and the spread of the logarithm by the 90th
# percentile, 1,029.
SMALLEST, MEDIAN, SPREAD = 32, 104, 1.79
COARSE = 4  # a class is a pattern of so many patches a side
NOISE = 32.0  # standard deviation of a pixel, of 255
SUCCESSORS = 4  # characters that may follow one


@sources.register("stand-in-images")
def stand_in_images(
    *,
    channels: int = 3,
    side: int = 32,
    classes: int = 10,
    n: int = 1000,
    n_test: int = 200,
    groups: int | None = None,
    most: int = 64,
    seed: int = 0,
) -> Source:
    """Made-up images, uint8 [n, channels, side, side]: a coarse random pattern for each class,
    under noise.

    Args:
        channels, side: of an image, which is a square.
        classes: as many labels as the real data have, each as often as can be.
        n, n_test: number of training and of test images.
        groups: so many natural clients in place of `n` images, of the sizes OpenImage's clients
            have: read from fedscale/openimage_client_sizes.npy of the data folder where it is
                there, else drawn alike.
        most: natural clients have at most so many images.

    >>> stand_in_images(channels=1, side=28, n=20, n_test=10).x.shape
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
        whole(owner, name, value, minimum=1)
    whole(owner, "n_test", n_test)
    random = generator(seed, "stand-in images")
    patterns = random.integers(64, 192, (classes, channels, COARSE, COARSE))
    group: Rows | None = None
    if groups is not None:
        sizes = np.minimum(openimage_sizes(whole(owner, "groups", groups, minimum=1), seed), most)
        group, n = np.repeat(np.arange(groups), sizes), int(sizes.sum())
    (x, y), (x_test, y_test) = (draw_images(random, patterns, side, count) for count in (n, n_test))
    info = {"source": "stand-in-images", "files": [], "seed": seed}
    rule = Standardise(mean=(128.0,), std=(64.0,))
    source = Source(x, y, classes=classes, standardise=rule, group=group, info=info)
    return replace(source, x_test=x_test, y_test=y_test) if n_test else source


def draw_images(
    random: np.random.Generator, patterns: NDArray[np.int64], side: int, count: int
) -> tuple[NDArray[np.uint8], Rows]:
    """Images [count, channels, side, side] and their classes."""
    y = random.permutation(np.arange(count) % len(patterns))
    place = np.arange(side) * COARSE // side
    clean = patterns[y][:, :, place][:, :, :, place]
    noisy = clean + NOISE * random.standard_normal(clean.shape, np.float32)
    return np.clip(noisy, 0, 255).astype(np.uint8), y


def openimage_sizes(count: int, seed: int) -> Rows:
    """Numbers of examples of so many clients, drawn from the real ones where they are there."""
    random = generator(seed, "openimage sizes")
    path = data_folder() / OPENIMAGE_SIZES
    sizes: Rows = np.maximum(
        MEDIAN * np.exp(SPREAD * random.standard_normal(count)), SMALLEST
    ).astype(np.int64)
    if path.is_file():
        try:
            sizes = random.choice(np.load(path, allow_pickle=False).astype(np.int64), count)
        except (OSError, ValueError) as error:
            raise bad_file(path, f"it cannot be read ({error})") from None
    return sizes


@sources.register("stand-in-text")
def stand_in_text(
    *,
    roles: int = 20,
    characters: int = 1000,
    sequence: int = 80,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Source:
    """Made-up text with the vocabulary of `shakespeare`: every character has a few that may follow
    it.

    Args:
        roles: number of natural clients.
        characters: of each.
        sequence, test_fraction: as of `shakespeare`.
    """
    owner = "dataset 'stand-in-text'"
    roles, sequence = (
        whole(owner, "roles", roles, minimum=1),
        whole(owner, "sequence", sequence, minimum=1),
    )
    characters = whole(owner, "characters", characters, minimum=2 * sequence + 2)
    cut = characters - round(fraction(owner, "test_fraction", test_fraction) * characters)
    random = generator(seed, "stand-in text")
    following = random.integers(1, len(VOCABULARY), (len(VOCABULARY), SUCCESSORS))
    choices = random.integers(SUCCESSORS, size=(characters, roles))
    text = np.zeros((characters, roles), np.int64)
    for place in range(1, characters):
        text[place] = following[text[place - 1], choices[place]]
    train = [cut_windows(text[:cut, role], sequence) for role in range(roles)]
    test = np.concatenate([cut_windows(text[cut:, role], sequence) for role in range(roles)])
    rows = np.concatenate(train)
    info = {"source": "stand-in-text", "files": [], "seed": seed}
    group = np.repeat(np.arange(roles), [len(windows) for windows in train])
    source = Source(rows[:, :-1], rows[:, 1:], classes=len(VOCABULARY), group=group, info=info)
    return replace(source, x_test=test[:, :-1], y_test=test[:, 1:]) if len(test) else source
