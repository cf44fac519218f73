"""A Hugging Face dataset, or the partitions of flwr-datasets, as a dataset with clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import DataError
from ..client_numbers import number_clients
from ..dataset import Dataset, Rows
from ..folders.image_files import Color, Fit, check_size, pixel_moments
from ..normalize import Standardise
from ..pooled_moments import pooled_standardise
from .columns import (
    ImageOptions,
    check_dataset,
    feature_of,
    read_column,
    read_inputs,
)

TESTS = ("test", "validation", "valid")  # splits of a DatasetDict that are the test set


def read_huggingface(
    dataset: Any,
    *,
    x: str | Sequence[str],
    y: str,
    client: str | None = None,
    test: Any = None,
    size: Sequence[int] | None = None,
    fit: Fit = "stretch",
    color: Color = "auto",
    scale: bool = True,
) -> Dataset:
    """Returns a dataset of Hugging Face's `datasets`, to be divided by `partition`.

    Args:
        dataset: a Dataset, or a DatasetDict whose split "train" is trained on.
        x: the column of inputs (images, arrays or tokens), or a list of columns of numbers.
        y: the column of targets: classes (ClassLabel, text, integers) or floating-point numbers.
        client: the column with the client of each row, for partition "natural".
        test: held-out rows: a Dataset, or the name of a split. By default the split "test", or else
            "validation", of a DatasetDict.
        size: [height, width] to which images are resized; None if all have one size.
        fit: how images of another shape are resized: stretch, crop or pad.
        color: auto (three channels if any image has color), gray or rgb.
        scale: standardise images per channel, and columns of numbers, by mean and standard
            deviation of the training rows.
    """
    train, held_out = _splits(dataset, test)
    parts = [train] if held_out is None else [train, held_out]
    return _read(parts, None, x, y, client, ImageOptions(check_size(size), fit, color), scale)


def read_partitioner(
    partitioner: Any,
    *,
    x: str | Sequence[str],
    y: str,
    test: Any = None,
    size: Sequence[int] | None = None,
    fit: Fit = "stretch",
    color: Color = "auto",
    scale: bool = True,
) -> Dataset:
    """Returns the partitions of a partitioner of flwr-datasets as natural clients.

    Args:
        partitioner: such as a DirichletPartitioner whose `dataset` is set.
        test: held-out rows, a Dataset, or None.
        x, y, size, fit, color, scale: as in `read_huggingface`.
    """
    if hasattr(partitioner, "partitioners"):
        raise DataError(
            "This is a FederatedDataset; give one of its partitioners and the test split: "
            "fds.load_partition(0), then from_partitioner(fds.partitioners['train'], "
            "test=fds.load_split('test'), ...)."
        )
    if not hasattr(partitioner, "load_partition") or not hasattr(
        type(partitioner), "num_partitions"
    ):
        raise DataError(
            "A partitioner of flwr-datasets is needed, with num_partitions and load_partition(); "
            f"got {type(partitioner).__name__}."
        )
    try:
        parts = [partitioner.load_partition(index) for index in range(partitioner.num_partitions)]
    except AttributeError as error:
        raise DataError(
            f"The partitioner has no dataset ({error}). Set it: partitioner.dataset = dataset."
        ) from None
    empty = [index for index, part in enumerate(parts) if not len(part)]
    if empty:
        raise DataError(
            f"{len(empty)} of {len(parts)} partitions have no rows (first: partition {empty[0]}). "
            "Ask the partitioner for fewer partitions, or set its min_partition_size."
        )
    natural = getattr(partitioner, "partition_id_to_natural_id", None) or {}
    names = tuple(str(natural.get(index, index)) for index in range(len(parts)))
    parts += [] if test is None else [test]
    options = ImageOptions(check_size(size), fit, color)
    return _read(parts, names, x, y, None, options, scale)


def _splits(dataset: Any, test: Any) -> tuple[Any, Any]:
    """Returns the training rows and the held-out rows or None."""
    if not isinstance(dataset, Mapping):
        if isinstance(test, str):
            raise DataError(
                f"test = {test!r} names a split, and this is one Dataset. Give a DatasetDict, as by"
                " dataset.train_test_split(0.2), or a Dataset as test."
            )
        return dataset, test
    if "train" not in dataset:
        raise DataError(
            f"The DatasetDict has no split 'train', only {', '.join(map(repr, dataset))}. Give the "
            "Dataset to train on, such as dataset['all']."
        )
    if test is None:
        test = next((name for name in TESTS if name in dataset), None)
    if isinstance(test, str):
        if test not in dataset:
            raise DataError(
                f"The DatasetDict has no split {test!r}, only {', '.join(map(repr, dataset))}."
            )
        test = dataset[test]
    return dataset["train"], test


def _read(
    parts: list[Any],
    clients: tuple[str, ...] | None,
    x: str | Sequence[str],
    y: str,
    client: str | None,
    options: ImageOptions,
    scale: bool,
) -> Dataset:
    """Returns the dataset of these parts.

    Args:
        parts: of the clients, or one of all; a last one may have the test rows.
        clients: the names of the clients, if each has a part of its own; otherwise None.
        client: the column of clients if they have not.
    """
    count = 1 if clients is None else len(clients)
    for index, part in enumerate(parts):
        check_dataset(part, "The test data" if index >= count else "The dataset")
    inputs, feature_names = read_inputs(parts, x, options)
    targets = read_column(parts, y)
    names = _class_names(parts[0], y, targets)
    tested = len(parts) > count
    train = np.concatenate(inputs[:count])
    groups: tuple[Rows | None, Rows | None, tuple[str, ...] | None] = (None, None, clients)
    if clients is not None:
        groups = np.repeat(np.arange(count), [len(part) for part in parts[:count]]), None, clients
    elif client is not None:
        groups = _clients(parts, client)
    return Dataset(
        train,
        np.concatenate(targets[:count]),
        inputs[-1] if tested else None,
        targets[-1] if tested else None,
        classes=None if names is None else len(names),
        class_names=names,
        feature_names=feature_names,
        standardise=_standardise(train, feature_names) if scale else None,
        group=groups[0],
        test_group=groups[1],
        group_names=groups[2],
        info={"source": "huggingface"},
    )


def _class_names(dataset: Any, y: str, targets: Sequence[NDArray[Any]]) -> tuple[str, ...] | None:
    """Returns the names of a ClassLabel; raises if rows have no label."""
    names = getattr(feature_of(dataset, y), "names", None)
    if names is None:
        return None
    without = sum(int((part < 0).sum()) for part in targets)
    if without:
        raise DataError(
            f"{without} rows have no label in column '{y}' (-1, as test sets of competitions have)."
            f" Leave them out: dataset.filter(lambda row: row['{y}'] >= 0)."
        )
    return tuple(names)


def _clients(parts: Sequence[Any], client: str) -> tuple[Rows, Rows | None, tuple[str, ...]]:
    """Returns the client of each training row, that of each test row or -1, and their names."""
    names = getattr(feature_of(parts[0], client), "names", None)
    values = []
    for part in parts if client in parts[-1].features else parts[:1]:
        column = read_column([part], client)[0]
        values.append(column if names is None else np.array(names)[column])
    group, clients = number_clients(values[0], len(values[0]), f"Column '{client}'")
    if len(values) < 2:
        return group, None, clients
    number = {name: index for index, name in enumerate(clients)}
    tests, test_names = number_clients(values[1], len(values[1]), f"Column '{client}'")
    known = np.array([number.get(name, -1) for name in test_names], np.int64)
    return group, known[tests], clients


def _standardise(x: NDArray[Any], feature_names: tuple[str, ...] | None) -> Standardise | None:
    if feature_names is not None:
        return pooled_standardise(torch.from_numpy(x), torch.tensor([len(x)]))
    return pixel_moments(x) if x.dtype == np.uint8 and x.ndim == 4 else None
