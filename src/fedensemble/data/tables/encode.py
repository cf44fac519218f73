"""Columns as numbers for a model: categories one-hot or by number, and targets as classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from .columns import Column, Table, check_known

Encoding = Literal["one-hot", "ordinal"]
MOST_CATEGORIES = 256  # of one column in a one-hot encoding
FALSE_TRUE = ["false", "true"]


def encode_inputs(
    table: Table, names: Sequence[str], encoding: Encoding
) -> tuple[NDArray[np.float32], tuple[str, ...], NDArray[np.bool_]]:
    """Returns inputs [n, columns], the name of each column, and which of them hold numbers.

    A column of numbers stays one column. A column of text with the values a and b becomes the
    columns "name=a" and "name=b" of zeros and ones, or one column of their numbers in sorted order.
    "false" and "true" become one column of zeros and ones.

    Args:
        names: of the columns to encode.
        encoding: of columns of text.
    """
    parts: list[NDArray[np.float32]] = []
    titles: list[str] = []
    numeric: list[bool] = []
    for name in names:
        column = table.columns[name]
        if column.numbers is not None:
            _check_finite(table, name, column.numbers)
            parts.append(column.numbers.astype(np.float32).reshape(-1, 1))
            titles.append(name)
            numeric.append(True)
            continue
        if name in table.mixed:
            raise DataError(
                f"Column '{name}' of {table.file} {table.mixed[name]}. Correct the file, name the "
                "column in categorical to take all its values as text, or leave it out by drop."
            )
        texts, codes = column.sorted_texts()
        if encoding == "ordinal" or [text.lower() for text in texts] == FALSE_TRUE:
            parts.append(codes.astype(np.float32).reshape(-1, 1))
            titles.append(name)
            numeric.append(encoding == "ordinal" and len(texts) > 2)
            continue
        if len(texts) > MOST_CATEGORIES:
            raise DataError(
                f"Column '{name}' of {table.file} holds {len(texts)} different texts, and a one-hot"
                f" encoding takes {MOST_CATEGORIES}. Leave it out by drop, group the values, or "
                "number them all by encoding = 'ordinal'."
            )
        parts.append(np.eye(len(texts), dtype=np.float32)[codes])
        titles += [f"{name}={text}" for text in texts]
        numeric += [False] * len(texts)
    return np.concatenate(parts, axis=1), tuple(titles), np.array(numeric)


def find_categories(table: Table, names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the categories of each column of text, in the order in which "ordinal" numbers them.

    Columns of "false" and "true" are left out: they are zeros and ones in any encoding.
    """
    columns = {name: table.columns[name] for name in names if table.columns[name].numbers is None}
    categories = {name: list(column.sorted_texts()[0]) for name, column in columns.items()}
    return {
        name: texts
        for name, texts in categories.items()
        if [text.lower() for text in texts] != FALSE_TRUE
    }


def encode_new_inputs(
    table: Table, titles: Sequence[str], categories: Mapping[str, Sequence[str]] | None = None
) -> NDArray[np.float32]:
    """Returns the rows of another table as `encode_inputs` has encoded those of training.

    Args:
        table: in which columns of categories, `category_columns`, were read as text.
        titles: the name of each encoded column.
        categories: of columns that hold the number of a category; None without such columns.

    Raises:
        DataError: a column is missing, has gaps, or a category that did not occur in training.
    """
    values = np.zeros((len(table), len(titles)), np.float32)
    of_category: dict[str, dict[str, int]] = {}
    for place, title in enumerate(titles):
        if title in table.columns and title in (categories or {}):
            number = {text: code for code, text in enumerate((categories or {})[title])}
            values[:, place] = _look_up(table, title, number)
        elif title in table.columns:
            values[:, place] = _numbers(table, title)
        elif (
            name := next((n for n in category_columns([title]) if n in table.columns), None)
        ) is None:
            missing = title if title in (categories or {}) else title.partition("=")[0]
            check_known(table.file, [missing], list(table.columns))
        else:
            of_category.setdefault(name, {})[title[len(name) + 1 :]] = place
    for name, places in of_category.items():
        values[np.arange(len(table)), _look_up(table, name, places)] = 1.0
    return values


def _look_up(table: Table, name: str, number: Mapping[str, int]) -> NDArray[np.int64]:
    """Returns the number of the category of each row in a column; raises for a new category."""
    column = table.columns[name]
    check_present(table, {name: column.missing})
    texts, codes = column.sorted_texts()
    unknown_texts = [text for text in texts if text not in number]
    if unknown_texts:
        row = int(np.flatnonzero(codes == list(texts).index(unknown_texts[0]))[0])
        known = [*number][:20]
        rest = len(number) - len(known)
        listed = ", ".join(known) + (f" and {rest} more" if rest else "")
        raise DataError(
            f"Column '{name}' of {table.file} holds '{unknown_texts[0]}' ({table.place(row)}), "
            f"which did not occur in training ({listed}). Correct it, or leave such rows out."
        )
    return np.array([number[text] for text in texts], np.int64)[codes]


def category_columns(titles: Sequence[str]) -> list[str]:
    """Returns what may be the names of columns of categories, which "name=value" encode.

    >>> category_columns(["age", "ward=A", "a=b=c"])
    ['ward', 'a', 'a=b']
    """
    return [
        title[:place]
        for title in titles
        for place, character in enumerate(title)
        if character == "="
    ]


def _numbers(table: Table, name: str) -> NDArray[np.float64]:
    """Returns a column of numbers, or one of false and true as 0 and 1."""
    column = table.columns[name]
    check_present(table, {name: column.missing})
    if column.numbers is not None:
        _check_finite(table, name, column.numbers)
        return column.numbers
    texts, codes = column.sorted_texts()
    other = [text for text in texts if text.lower() not in FALSE_TRUE]
    if other:
        raise DataError(
            f"Column '{name}' of {table.file} holds the text '{other[0]}', and numbers in the "
            "training data. Correct it. Runs of earlier versions do not know the categories that "
            "encoding = 'ordinal' has numbered: train again, or give numbers in an .npz file."
        )
    return np.array([float(FALSE_TRUE.index(text.lower())) for text in texts])[codes]


def encode_classes(
    table: Table, name: str, class_names: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Returns the class of each row, [n], and the names of the classes.

    Args:
        class_names: all classes in the order of their numbers; None sorts the values that occur.
    """
    texts, codes = table.columns[name].sorted_texts()
    if table.columns[name].numbers is not None and 2 * len(texts) > len(table) and len(texts) > 20:
        raise DataError(
            f"Column '{name}' of {table.file} holds {len(texts)} different whole numbers in "
            f"{len(table)} rows, and each of them would be a class. For a quantity to predict set "
            "regression = true."
        )
    if class_names is None:
        return codes.astype(np.int64), tuple(texts)
    number = {text: index for index, text in enumerate(class_names)}
    extra = [text for text in texts if text not in number]
    if extra:
        row = int(np.flatnonzero(codes == list(texts).index(extra[0]))[0])
        raise DataError(
            f"Column '{name}' of {table.file} holds '{extra[0]}' ({table.place(row)}), which is not"
            f" among class_names ({', '.join(class_names)}). Add it, or drop such rows."
        )
    order = np.array([number[text] for text in texts], np.int64)
    return order[codes], tuple(class_names)


def check_present(table: Table, gaps: Mapping[str, NDArray[np.bool_]]) -> None:
    """Raises if a column has missing values; the message counts those of every column.

    Args:
        gaps: which rows have no value, [n], of each column.
    """
    counts = {name: int(missing.sum()) for name, missing in gaps.items() if missing.any()}
    if not counts:
        return
    row = int(np.flatnonzero(gaps[next(iter(counts))])[0])
    listed = [f"'{name}' {count}" for name, count in counts.items()]
    shown = ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
    raise DataError(
        f"{table.file} has missing values, by column: {shown} (the first in {table.place(row)}). "
        "Fill them, leave the columns out by drop, or their rows by missing = 'drop'."
    )


def is_whole(column: Column) -> bool:
    """Whether a column holds classes: text, or whole numbers only."""
    values = column.numbers
    return values is None or bool((values == np.floor(values)).all())


def _check_finite(table: Table, name: str, values: NDArray[np.float64]) -> None:
    """Raises if a column holds infinity, or a number that float32 cannot hold."""
    bad = np.flatnonzero(np.abs(values) > np.finfo(np.float32).max)
    if len(bad):
        raise DataError(
            f"Column '{name}' of {table.file} holds {values[bad[0]]:g} ({table.place(int(bad[0]))}"
            "), which float32 cannot hold. Scale the column, or leave it out by drop."
        )
