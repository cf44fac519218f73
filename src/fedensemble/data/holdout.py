"""What is tested on: part of the training data in place of the test set, so that a search never
sees it; or less.
"""

from dataclasses import replace

import numpy as np

from ..arguments import fraction, whole
from .convert import as_tensor
from .dataset import Source
from .digits import hold_out

SEED = 0  # the same examples for every run, so that all choices are made on one set


def with_validation(source: Source, share: float) -> Source:
    """The source with this share of its training examples as its test set: of every class, or of
    all rows.

    The real test set is left out altogether.

    >>> from fedensemble.data import load
    >>> held = with_validation(load("gaussians", n=100, n_test=7), 0.2)
    >>> len(held.x), len(held.x_test)
    (80, 20)
    """
    fraction("data", "validation", share)
    y = as_tensor(source.y)
    single = y.dim() == 1 and not y.is_floating_point()
    held = hold_out(source.labels() if single else np.zeros(len(source), np.int64), share, SEED)
    group = None if source.group is None else source.group[~held]
    x, y = as_tensor(source.x), as_tensor(source.y)
    test = (x[held], y[held]) if held.any() else (None, None)
    info = {**source.info, "validation": share}
    return replace(
        source, x=x[~held], y=y[~held], x_test=test[0], y_test=test[1], group=group, info=info
    )


def with_fewer_tests(source: Source, most: int) -> Source:
    """The source with at most so many test examples, spread evenly over them.

    >>> from fedensemble.data import load
    >>> len(with_fewer_tests(load("gaussians", n=10, n_test=100), 30).x_test)
    30
    """
    whole("data", "test_examples", most, minimum=1)
    if source.x_test is None or source.y_test is None or len(source.x_test) <= most:
        return source
    rows = np.linspace(0, len(source.x_test) - 1, most).astype(np.int64)
    x, y = as_tensor(source.x_test)[rows], as_tensor(source.y_test)[rows]
    return replace(source, x_test=x, y_test=y, info={**source.info, "test_examples": most})
