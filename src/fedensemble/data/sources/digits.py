"""Digits: 1,797 small images of handwritten digits that scikit-learn contains; no download."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...arguments import require_fraction
from ...errors import DataError
from ..dataset import Dataset, datasets
from ..normalize import Standardise
from ..splits.holdout import draw_holdout_mask

# Mean and standard deviation of all 1,797 x 64 pixels, whose values are 0..16. They are constants,
# so that the inputs of a model do not depend on which images are held out.
STANDARDISE = Standardise(mean=(4.8842,), std=(6.0168,))


@datasets.register("digits")
def digits(*, test_fraction: float = 0.25, split_seed: int = 0) -> Dataset:
    """Digits: uint8 [n, 1, 8, 8] with values 0..16, labels 0..9, with a stratified test set.

    Args:
        test_fraction: require_fraction of each class that is held out as the test set.
        split_seed: seed of the choice of test images. It is separate from the seed of the run, so
            that runs with different seeds have the same test set.
    """
    test_fraction = require_fraction("dataset 'digits'", "test_fraction", test_fraction)
    table = _read_table()
    x = table[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8)
    y = table[:, -1].astype(np.int64)
    test = draw_holdout_mask(y, test_fraction, split_seed)
    x_test, y_test = (x[test], y[test]) if test.any() else (None, None)
    info = {
        "source": "digits",
        "files": [],
        "test_fraction": test_fraction,
        "split_seed": split_seed,
    }
    return Dataset(
        x[~test],
        y[~test],
        x_test,
        y_test,
        class_names=tuple("0123456789"),
        standardise=STANDARDISE,
        info=info,
    )


def _read_table() -> NDArray[np.float64]:
    """Returns 64 pixels and the label of each image, from scikit-learn's file."""
    # `find_spec` finds the package without importing it: that takes a second, and `load_digits`
    # would do no more than read this file.
    package = find_spec("sklearn")
    if package is None:
        raise DataError("Dataset 'digits' comes with scikit-learn: run `pip install scikit-learn`.")
    for folder in package.submodule_search_locations or ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.exists():
            return np.loadtxt(file, delimiter=",")
    # a version that keeps its files elsewhere
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels])
