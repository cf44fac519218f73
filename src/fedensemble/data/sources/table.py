"""The user's own table, from a CSV or Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from ...arguments import require_bool, require_one_of
from ...errors import DataError, InputError
from ..dataset import Dataset, Rows, datasets
from ..labels.label_names import check_class_names
from ..normalize import Standardise
from ..pooled_moments import pooled_standardise
from ..splits.holdout import SEED, draw_holdout_mask, share_of_tests
from ..tables.columns import Column, Table, check_known, concatenate
from ..tables.encode import (
    Encoding,
    check_present,
    encode_classes,
    encode_inputs,
    find_categories,
    is_whole,
)
from ..tables.read import read_table
from .user_file import find_path

Missing = Literal["error", "drop"]
LARGE_TARGET = 30.0  # with the default learning rate, targets beyond it diverge
TEST_VALUES = {"test": True, "true": True, "1": True, "train": False, "false": False, "0": False}


@datasets.register("table")
def table(
    *,
    path: Path | str,
    target: str,
    client: str | None = None,
    root: Path | None = None,
    columns: list[str] | None = None,
    drop: list[str] | None = None,
    categorical: list[str] | None = None,
    encoding: Encoding = "one-hot",
    regression: bool = False,
    class_names: list[str] | None = None,
    test_file: Path | str | None = None,
    test_column: str | None = None,
    test_share: float | None = None,
    missing: Missing = "error",
    scale: bool = True,
    scale_target: bool = False,
    delimiter: str | None = None,
) -> Dataset:
    """The rows of a CSV or Parquet file: numbers, and text as categories; standardised.

    Text, booleans and whole numbers in the column `target` are classes, other numbers are targets
    of a regression.

    Args:
        path: the file: .parquet, or .csv or .tsv, also with .gz. If it does not exist, it is looked
            for in the data folder.
        target: name of the column to predict.
        client: name of the column with the client of each row, for partition natural.
        root: data folder.
        columns: names of the columns that are inputs; by default all others.
        drop: names of columns that are left out.
        categorical: names of columns of numbers that are categories.
        encoding: of categories: a column of zeros and ones per category, or one column with the
            number of the category in sorted order.
        regression: whether whole numbers in `target` are quantities, not classes.
        class_names: the classes in the order of their numbers; by default sorted.
        test_file: a file with the same columns that has the test rows; client is optional in it.
        test_column: name of the column that marks test rows: test and train, true and false, or 1
            and 0.
        test_share: share of the rows that are drawn as test set, of every class; by default 0.2,
            and 0 with test_file or test_column.
        missing: what to do about rows with missing values: an error, or drop them.
        scale: whether columns of numbers are standardised by mean and standard deviation of the
            training rows.
        scale_target: whether targets of a regression are standardised, too. Predictions are then
            standardised targets; a note has the mean and the standard deviation.
        delimiter: between the cells of a CSV file; by default a comma, or a tab in .tsv.
    """
    owner = "dataset 'table'"
    require_one_of(owner, "encoding", encoding, get_args(Encoding))
    require_one_of(owner, "missing", missing, get_args(Missing))
    flags = {"scale": scale, "scale_target": scale_target, "regression": regression}
    for flag, value in flags.items():
        require_bool(owner, flag, value)
    share = share_of_tests(owner, test_share, {"test_file": test_file, "test_column": test_column})
    roles = [name for name in (target, client, test_column) if name is not None]
    if len(set(roles)) < len(roles):
        raise InputError(f"target, client and test_column must be different; got {roles}.")
    text = {name for name in (client, test_column, *(categorical or ())) if name is not None}

    rows = read_table(find_path("table", path, root), delimiter, drop or (), text)
    check_known(rows.file, [*roles, *(columns or ()), *(categorical or ())], [*rows.columns])
    inputs = columns or [name for name in rows.columns if name not in roles]
    if not inputs or {*inputs} & {*roles}:
        raise InputError(
            f"{rows.file} needs columns for inputs besides target, client and test_column; "
            f"got {inputs}."
        )
    info: dict[str, Any] = {"source": "table", "files": [str(rows.file)]}
    notes: list[str] = []
    is_test = np.zeros(len(rows), bool)
    if test_file is not None:
        test = read_table(find_path("table", test_file, root), delimiter, (), text)
        info["files"].append(str(test.file))
        rows = _append(rows, test, [*inputs, target], client)
        is_test = np.arange(len(rows)) >= len(rows) - len(test)
    complete = _complete_rows(rows, inputs + roles, client, is_test, missing)
    if missing == "drop":
        info["dropped_rows"] = int((~complete).sum())
        notes.append(
            f"{info['dropped_rows']} of {len(rows)} rows have a missing value and are left out."
        )
    rows, is_test = rows.take(np.flatnonzero(complete)), is_test[complete]

    y, names = _targets(rows, target, regression, class_names)
    if test_column is not None:
        is_test = _marked_rows(rows, test_column)
    elif share:
        labels = np.zeros(len(rows), np.int64) if names is None else y.astype(np.int64)
        is_test = draw_holdout_mask(labels, share, SEED)
    if is_test.all():
        raise DataError(f"All rows of {rows.file} are test rows; training needs some.")
    if names is None and scale_target:
        y, moments = _standardised(y, ~is_test)
        notes.append(
            f"Targets are standardised: ({target} - {moments.mean[0]:.8g}) / {moments.std[0]:.8g}."
        )
    elif names is None and max(abs(y.mean()), y.std()) > LARGE_TARGET:
        notes.append(
            f"Targets have the mean {y.mean():.3g} and the standard deviation {y.std():.3g}, and "
            "training may diverge. Scale them to about 1, as by scale_target = true."
        )
    x, titles, numeric = encode_inputs(rows, inputs, encoding)
    if encoding == "ordinal":
        info["categories"] = find_categories(rows, inputs)
    clients = (None, None, None) if client is None else _clients(rows, client, is_test)
    y = y.astype(np.float32) if names is None else y
    tested = bool(is_test.any())
    return Dataset(
        x[~is_test],
        y[~is_test],
        x[is_test] if tested else None,
        y[is_test] if tested else None,
        classes=None if names is None else len(names),
        class_names=names,
        feature_names=titles,
        standardise=_standardise(x[~is_test], numeric) if scale and numeric.any() else None,
        group=clients[0],
        group_names=clients[2],
        test_group=clients[1] if tested else None,
        info=info,
        notes=tuple(notes),
    )


def _complete_rows(
    rows: Table, used: list[str], client: str | None, is_test: NDArray[np.bool_], missing: str
) -> NDArray[np.bool_]:
    """Returns which rows have values in all columns that are used, [n].

    Args:
        client: name of the column of clients; a test row may belong to none.
        is_test: rows of the test file, [n].
        missing: whether a row that is not complete is an "error".
    """
    gaps = {name: rows.columns[name].missing for name in used}
    if client is not None:
        gaps[client] = gaps[client] & ~is_test
    complete: NDArray[np.bool_] = ~np.any(list(gaps.values()), axis=0)
    if missing == "error":
        check_present(rows, gaps)
    elif not complete.any():
        raise DataError(f"Every row of {rows.file} has a missing value.")
    return complete


def _append(rows: Table, test: Table, needed: list[str], client: str | None) -> Table:
    """Returns the rows of both tables; those of the test file may have no client."""
    check_known(test.file, needed, list(test.columns))
    columns = {}
    for name in needed:
        own, other = rows.columns[name], test.columns[name]
        if (own.numbers is None) != (other.numbers is None):
            kinds = ["text" if column.numbers is None else "numbers" for column in (own, other)]
            raise DataError(
                f"Column '{name}' holds {kinds[0]} in {rows.file} and {kinds[1]} in {test.file}. "
                "Correct one of the files, or name the column in categorical."
            )
        columns[name] = concatenate([own, other])
    if client is not None:
        nobody = Column(codes=np.full(len(test), -1), texts=())
        columns[client] = concatenate([rows.columns[client], test.columns.get(client, nobody)])
    # Lines would be those of two files; row numbers go on in the second.
    return Table(rows.file, columns, mixed={**test.mixed, **rows.mixed})


def _targets(
    rows: Table, target: str, regression: bool, class_names: list[str] | None
) -> tuple[NDArray[Any], tuple[str, ...] | None]:
    """Returns numbers of classes and their names, or quantities and None."""
    column = rows.columns[target]
    if not regression and is_whole(column):
        names = None if class_names is None else check_class_names(class_names)
        return encode_classes(rows, target, names)
    if column.numbers is None or class_names is not None:
        held = "text" if column.numbers is None else "numbers with fractions"
        raise InputError(
            f"Column '{target}' of {rows.file} holds {held}, and regression = "
            f"{str(regression).lower()} with class_names = {class_names} does not fit. Leave both "
            "out, or correct the column."
        )
    return column.numbers, None


def _marked_rows(rows: Table, name: str) -> NDArray[np.bool_]:
    """Returns which rows a column marks as test rows, [n]."""
    texts, codes = rows.columns[name].sorted_texts()
    unknown = [text for text in texts if text.lower() not in TEST_VALUES]
    if unknown:
        raise DataError(
            f"Column '{name}' of {rows.file} marks test rows, and holds '{unknown[0]}'. Write test "
            "and train, true and false, or 1 and 0."
        )
    return np.array([TEST_VALUES[text.lower()] for text in texts])[codes]


def _clients(
    rows: Table, name: str, is_test: NDArray[np.bool_]
) -> tuple[Rows, Rows, tuple[str, ...]]:
    """Returns the client of each training row, that of each test row or -1, and their names."""
    trained = rows.columns[name].take(np.flatnonzero(~is_test))
    names, group = trained.sorted_texts()
    number = {text: index for index, text in enumerate(names)}
    column = rows.columns[name]
    assert column.codes is not None  # it was read as text
    of_text = np.array([*(number.get(text, -1) for text in column.texts), -1], np.int64)
    return group.astype(np.int64), of_text[column.codes[is_test]], tuple(names)


def _standardised(
    y: NDArray[Any], is_training: NDArray[np.bool_]
) -> tuple[NDArray[Any], Standardise]:
    """Returns standardised quantities [n], and the moments of the training rows."""
    column = torch.tensor(y).unsqueeze(1)
    training = column[torch.tensor(is_training)]
    moments = pooled_standardise(training, torch.tensor([len(training)]))
    return moments(column, torch.float64)[:, 0].numpy(), moments


def _standardise(x: NDArray[np.float32], numeric: NDArray[np.bool_]) -> Standardise:
    """Returns the normalization of columns of numbers; zeros and ones stay as they are."""
    moments = pooled_standardise(torch.tensor(x), torch.tensor([len(x)]))
    mean = np.where(numeric, moments.mean, 0.0)
    std = np.where(numeric, moments.std, 1.0)
    return Standardise(tuple(mean.tolist()), tuple(std.tolist()))
