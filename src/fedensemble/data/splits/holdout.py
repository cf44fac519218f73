"""Changes the test set of a dataset: a validation split in its place, or fewer test examples."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...arguments import require_fraction, require_integer
from ...errors import InputError
from ..convert import as_tensor
from ..dataset import Dataset, Rows, make_rng

TEST_SHARE = 0.2  # of a user's data that come without a test set
SEED = 0  # fixed, so that all runs of a search hold out the same examples


def share_of_tests(owner: str, share: float | None, given: Mapping[str, object]) -> float:
    """Returns the share of rows to draw as test set; raises if the test rows are given, too.

    Args:
        owner: for messages.
        share: that the user asked for, or None.
        given: options that give the test rows, by name.
    """
    set_ = [name for name, value in given.items() if value is not None]
    if len(set_) > 1:
        raise InputError(f"{' and '.join(set_)} both give the test rows: set only one.")
    if set_ and share:
        raise InputError(f"test_share draws test rows, and {set_[0]} gives them: set only one.")
    if share is None:
        return 0.0 if set_ else TEST_SHARE
    return require_fraction(owner, "test_share", share) if share else 0.0


def draw_holdout_mask(
    labels: Rows, share: float, seed: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Returns a mask of held-out rows, [n]: a random `share` of every class, rounded.

    >>> draw_holdout_mask(np.array([0, 0, 0, 0, 1, 1, 1, 1]), 0.25, seed=0).sum()
    np.int64(2)
    """
    rng = make_rng(seed, "hold-out")
    mask = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        mask[rows[: round(share * len(rows))]] = True
    return mask


def hold_out_validation(source: Dataset, share: float) -> Dataset:
    """Returns the dataset with a `share` of its training examples in place of its test set.

    The share is taken from every class, or from all rows if an example has no single class. The
    original test set is dropped, so that a hyper-parameter search cannot use it.

    >>> from fedensemble.data import load
    >>> held_out = hold_out_validation(load("gaussians", n=100, n_test=7), 0.2)
    >>> len(held_out.x), len(held_out.x_test)
    (80, 20)
    """
    require_fraction("data", "validation", share)
    x, y = as_tensor(source.x), as_tensor(source.y)
    has_labels = y.dim() == 1 and not y.is_floating_point()
    labels = source.labels() if has_labels else np.zeros(len(source), np.int64)
    mask = draw_holdout_mask(labels, share, SEED)
    x_test, y_test = (x[mask], y[mask]) if mask.any() else (None, None)
    return replace(
        source,
        x=x[~mask],
        y=y[~mask],
        x_test=x_test,
        y_test=y_test,
        group=None if source.group is None else source.group[~mask],
        test_group=None if source.group is None or x_test is None else source.group[mask],
        info={**source.info, "validation": share},
    )


def limit_test_set(source: Dataset, max_examples: int) -> Dataset:
    """Returns the dataset with at most `max_examples` test examples, evenly spread.

    >>> from fedensemble.data import load
    >>> len(limit_test_set(load("gaussians", n=10, n_test=100), 30).x_test)
    30
    """
    require_integer("data", "test_examples", max_examples, minimum=1)
    if source.x_test is None or source.y_test is None or len(source.x_test) <= max_examples:
        return source
    rows = np.linspace(0, len(source.x_test) - 1, max_examples).astype(np.int64)
    x, y = as_tensor(source.x_test)[rows], as_tensor(source.y_test)[rows]
    return replace(
        source,
        x_test=x,
        y_test=y,
        test_group=None if source.test_group is None else source.test_group[rows],
        info={**source.info, "test_examples": max_examples},
    )
