"""The client of each test row: the test set is divided by the rule of the training set."""

from __future__ import annotations

import numpy as np

from ..client_rows import NOBODY
from ..convert import as_targets, as_tensor
from ..dataset import Dataset, Rows, make_rng


def assign_test_rows(source: Dataset, name: str, rows: list[Rows], seed: int) -> Rows | None:
    """Returns the client of each test row, [n_test], or None if there is nothing to divide.

    Natural clients own the test rows of their group. Otherwise a client's part of the test rows of
    a class is its part of the training rows of that class, up to one row; examples without one
    class count as one class. Rows whose class no client has belong to nobody, -1.

    Args:
        name: registered name of the partition.
        rows: training rows of each client.
        seed: of the partition. The draws have a key of their own, so that they change nothing else.
    """
    if source.x_test is None or source.y_test is None:
        return None
    if name == "natural":
        return _natural_owners(source, rows)
    owner = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
    labels, test_labels = _labels(source.y)[np.concatenate(rows)], _labels(source.y_test)
    # The rows of a class follow each other in `order`, sorted by client.
    order = np.argsort(labels, kind="stable")
    values, starts = np.unique(labels[order], return_index=True)
    owners_of = dict(zip(values.tolist(), np.split(owner[order], starts[1:]), strict=True))
    rng = make_rng(seed, "partition/test-owner")
    result = np.full(len(test_labels), NOBODY)
    for label in np.unique(test_labels).tolist():
        if label not in owners_of:
            continue
        clients, counts = np.unique(owners_of[label], return_counts=True)
        # Rounding happens at the boundaries of this order. With clients in a fixed order, the same
        # ones would get the additional row in every class.
        mixed = rng.permutation(len(clients))
        mine = np.flatnonzero(test_labels == label)
        shares = np.cumsum(counts[mixed]) / counts.sum()
        ends = np.rint(shares * len(mine)).astype(np.int64)
        result[rng.permutation(mine)] = np.repeat(clients[mixed], np.diff(ends, prepend=0))
    return result


def _natural_owners(source: Dataset, rows: list[Rows]) -> Rows | None:
    """Returns the client whose group each test row has; -1 if the client does not take part."""
    if source.test_group is None or source.group is None:
        return None
    groups = np.array([source.group[part[0]] for part in rows])
    order = np.argsort(groups)
    place = np.searchsorted(groups[order], source.test_group).clip(max=len(groups) - 1)
    client = order[place]
    return np.where(groups[client] == source.test_group, client, NOBODY)


def _labels(y: object) -> Rows:
    """Returns the class of each row, [n]; 0 if a row has not one class."""
    targets = as_targets(as_tensor(y))
    if targets.dim() != 1 or targets.is_floating_point():
        return np.zeros(len(targets), np.int64)
    labels: Rows = targets.cpu().numpy()
    return labels
