"""Digits: 1,797 small images of handwritten digits that come with scikit-learn, so nothing is
downloaded.
"""

import numpy as np

from ..arguments import fraction
from ..errors import DataError
from .dataset import Rows, Source, generator, sources
from .normalize import Standardise

# Mean and standard deviation of all 1,797 x 64 pixels, whose values are 0..16. Constants, so that
# the numbers a
# model sees do not depend on which images are held out.
STANDARDISE = Standardise(mean=(4.8842,), std=(6.0168,))


@sources.register("digits")
def digits(*, test_fraction: float = 0.25, split_seed: int = 0) -> Source:
    """Digits: uint8 [n, 1, 8, 8] with values 0..16, labels 0..9; a share of every class is held out
    as the test set.

    Args:
        test_fraction: share of each class that is held out.
        split_seed: decides which images those are; apart from the run's seed, so that runs share a
            test set.
    """
    test_fraction = fraction("dataset 'digits'", "test_fraction", test_fraction)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "Dataset 'digits' comes with scikit-learn: run `pip install scikit-learn`."
        ) from None
    pixels, y = load_digits(return_X_y=True)
    x, y = pixels.astype(np.uint8).reshape(-1, 1, 8, 8), y.astype(np.int64)
    test = hold_out(y, test_fraction, split_seed)
    x_test, y_test = (x[test], y[test]) if test.any() else (None, None)
    info = {
        "source": "digits",
        "files": [],
        "test_fraction": test_fraction,
        "split_seed": split_seed,
    }
    return Source(
        x[~test], y[~test], x_test, y_test, classes=10, standardise=STANDARDISE, info=info
    )


def hold_out(labels: Rows, share: float, seed: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """True for the rows held out, [n]: the given share of every class, rounded, chosen at random.

    >>> hold_out(np.array([0, 0, 0, 0, 1, 1, 1, 1]), 0.25, seed=0).sum()
    np.int64(2)
    """
    random = generator(seed, "hold-out")
    held = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        held[rows[: round(share * len(rows))]] = True
    return held
