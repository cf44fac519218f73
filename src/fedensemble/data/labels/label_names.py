"""Labels that are names: text, categories and booleans become the numbers of classes.

The classes of text are sorted. The classes of a categorical column keep the order of its
categories. False is class 0 and True is class 1. All clients and the test set share one numbering.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import DataError
from ..convert import reject_masked

BOOLEANS = (False, True)
LONGEST_LIST = 5  # of labels in a message


class NamedLabels(NamedTuple):
    """Labels that are not numbers.

    Args:
        values: the label of each row: text, booleans, or values of categories.
        declared: all classes, if the type of the labels declares them: categories and booleans.
    """

    values: list[Any]
    declared: tuple[Any, ...] | None


def read_named_labels(y: Any, where: str) -> NamedLabels | None:
    """Returns labels that are text, categories or booleans; None for anything else.

    Args:
        where: the name of the data in error messages, such as "client 3".
    """
    if isinstance(y, Tensor):
        return NamedLabels(_flat(y.numpy(force=True), where), BOOLEANS) if _is_bool(y) else None
    reject_masked(y)
    if (categories := _categories(y)) is not None:
        return categories._replace(values=_present(categories.values, where))
    try:
        values = np.asarray(y)
    except Exception:  # ragged lists and exotic containers; the conversion to numbers reports them
        return None
    kind = values.dtype.kind
    if kind == "b":
        return NamedLabels(_flat(values, where), BOOLEANS)
    if kind in "US":
        # NumPy turns a list such as [1, "a"] into text without a word.
        if isinstance(y, (list, tuple)) and not all(isinstance(v, (str, bytes)) for v in y):
            raise _mixed(where, y)
        return NamedLabels([_text(value) for value in _flat(values, where)], None)
    if kind != "O" or values.ndim == 0:
        return None
    flat = values.ravel().tolist()
    types = {type(value) for value in flat if not _is_missing(value)}
    if types and types <= {str, bytes, np.str_}:
        texts = _present(_flat(values, where), where)
        return NamedLabels([_text(value) for value in texts], None)
    if types and types <= {bool, np.bool_}:
        return NamedLabels([bool(v) for v in _present(_flat(values, where), where)], BOOLEANS)
    if types & {str, bytes, np.str_, bool, np.bool_}:
        raise _mixed(where, flat)
    return None


def encode_labels(
    training: Sequence[tuple[str, Any]],
    test: tuple[str, Any] | None,
    class_names: Sequence[str] | None = None,
) -> tuple[list[Any], Any, tuple[str, ...] | None]:
    """Returns the targets of each part and of the test set as numbers, and the class names.

    Targets that are numbers are returned as they are; the names are then `class_names`.

    Args:
        training: name for messages, and targets, of each part (client).
        test: the same for the test set, or None.
        class_names: names of all classes in the order of their numbers; None takes the classes
            that occur in training, or that the type of the labels declares.

    >>> encode_labels([("client 0", ["dog", "cat"])], ("the test data", ["dog"]))[1:]
    (array([1]), ('cat', 'dog'))
    """
    names = None if class_names is None else check_class_names(class_names)
    everything = [*training, test] if test is not None else list(training)
    read = [read_named_labels(y, where) for where, y in everything]
    if all(labels is None for labels in read):
        return [y for _, y in training], None if test is None else test[1], names
    _check_same_kind(everything, read)
    parts = [labels for labels in read if labels is not None]
    if names is not None:
        classes = _classes_of_names(parts, names)
    else:
        classes = _find_classes(parts[: len(training)])
        names = check_class_names([str(value) for value in classes])
    advice = (
        "These labels never occur in training. Drop such rows, or list all classes with "
        "class_names=[...]; they then count as errors."
        if class_names is None
        else "Add them to class_names, or drop such rows."
    )
    encoded = [
        _encode(labels.values, classes, where, advice)
        for (where, _), labels in zip(everything, parts, strict=True)
    ]
    return encoded[: len(training)], None if test is None else encoded[-1], names


def encode_targets(y: Any, class_names: Sequence[str] | None, classes: int) -> Any:
    """Returns labels for a prediction as numbers; numbers are returned as they are.

    Args:
        class_names: of the prediction, or None.
        classes: number of classes of the prediction.

    >>> encode_targets(["dog", "cat"], ("cat", "dog"), 2).tolist()
    [1, 0]
    """
    labels = read_named_labels(y, "the test data")
    if labels is None:
        return y
    if class_names is None:
        if labels.declared == BOOLEANS and classes == 2:
            return _encode(labels.values, BOOLEANS, "the test data", "")
        raise DataError(
            "The test labels are text, but the modes were trained on numbers without names: give "
            "the numbers of the classes, or train with class_names=[...]."
        )
    known = _classes_of_names([labels], tuple(class_names))
    advice = "The modes cannot predict them; drop such rows."
    return _encode(labels.values, known, "the test data", advice)


def check_class_names(names: Any) -> tuple[str, ...]:
    """Returns the names as a tuple; raises unless they are different texts, one per class."""
    # A 0-dimensional array has __iter__, which raises.
    if isinstance(names, (str, bytes)) or not np.iterable(names):
        raise DataError(f"class_names must be a list of texts, one per class; got {names!r}.")
    texts = tuple(str(name) if isinstance(name, str) else name for name in names)
    for number, name in enumerate(texts):
        if not isinstance(name, str) or not name:
            raise DataError(
                f"The name of class {number} must be a text that is not empty; got {name!r}."
            )
        try:
            name.encode()  # fails for a lone surrogate, which no file can hold
        except UnicodeEncodeError:
            raise DataError(
                f"The name of class {number} is not valid Unicode text: {name!a}. Rename it."
            ) from None
    if len(set(texts)) < len(texts):
        twice = next(name for name in texts if texts.count(name) > 1)
        raise DataError(f"class_names has {twice!r} twice; give every class its own name.")
    if not texts:
        raise DataError("class_names is empty; give one name per class.")
    return texts


def _categories(y: Any) -> NamedLabels | None:
    """Returns the labels of a categorical column; None for other columns.

    pandas is not imported: a Series has its codes and categories at `.cat`, a Categorical itself.
    """
    if not hasattr(getattr(y, "dtype", None), "categories"):
        return None
    column = getattr(y, "cat", y)
    codes, categories = getattr(column, "codes", None), getattr(column, "categories", None)
    if codes is None or categories is None:  # polars: its values are text
        return None
    values = np.asarray(categories).tolist()
    rows = [values[code] if code >= 0 else None for code in np.asarray(codes).tolist()]
    return NamedLabels(rows, tuple(values))


def _find_classes(parts: list[NamedLabels]) -> tuple[Any, ...]:
    """Returns the classes of the training labels: the order that all parts declare, or sorted."""
    declared = {labels.declared for labels in parts}
    if len(declared) == 1 and (common := next(iter(declared))) is not None:
        return common
    # Clients that read their own files often declare only the categories that they have. The
    # union is then sorted, so that it does not depend on the order of the clients.
    occurring = {value for labels in parts for value in (labels.declared or labels.values)}
    try:
        return tuple(sorted(occurring))
    except TypeError:
        raise _mixed("the clients", list(occurring)) from None


def _classes_of_names(parts: list[NamedLabels], names: tuple[str, ...]) -> tuple[Any, ...]:
    """Returns the label that stands for each name: the name itself, or False and True for two."""
    booleans = all(labels.declared == BOOLEANS for labels in parts)
    if booleans and len(names) == 2 and set(names) != {"False", "True"}:
        return BOOLEANS
    if all(isinstance(value, str) for labels in parts for value in labels.values):
        return names
    by_text = {str(value): value for labels in parts for value in labels.declared or ()}
    return tuple(by_text.get(name, name) for name in names)


def _encode(
    values: list[Any], classes: Sequence[Any], where: str, advice: str
) -> NDArray[np.int64]:
    """Returns the number of the class of each label, [n].

    Args:
        advice: what to do about a label that is not among the classes.
    """
    number = {value: index for index, value in enumerate(classes)}
    try:
        return np.fromiter((number[value] for value in values), np.int64, len(values))
    except KeyError:
        unseen = sorted({str(value) for value in values if value not in number})
        row = next(row for row, value in enumerate(values) if value not in number)
        known = _list_labels([str(value) for value in classes])
        raise DataError(
            f"Labels of {where} are not among the classes ({known}): {_list_labels(unseen)} "
            f"(first in row {row}). {advice}"
        ) from None


def _check_same_kind(
    everything: Sequence[tuple[str, Any]], read: Sequence[NamedLabels | None]
) -> None:
    """Raises if some labels are numbers and others are not."""
    named = next(index for index, labels in enumerate(read) if labels is not None)
    for (where, _), labels in zip(everything, read, strict=True):
        if labels is None:
            raise DataError(
                f"Labels of {everything[named][0]} are names (text, categories or booleans), those "
                f"of {where} are numbers. Give all labels in the same way."
            )


def _flat(values: NDArray[Any], where: str) -> list[Any]:
    """Returns the values of a vector; raises for other shapes."""
    if values.ndim != 1:
        raise DataError(
            f"Labels of {where} must be one per example, [n]; got shape {values.shape}."
            + (
                " Flatten them, y.reshape(-1); of a DataFrame, take the column, y['label']."
                if values.ndim == 2 and values.shape[1] == 1
                else ""
            )
        )
    return list(values.tolist())


def _present(values: list[Any], where: str) -> list[Any]:
    """Returns the labels; raises if one is missing."""
    row = next((row for row, value in enumerate(values) if _is_missing(value)), None)
    if row is not None:
        raise DataError(
            f"Labels of {where} have a missing value in row {row}. Drop such rows, or give them a "
            "class of their own."
        )
    return values


def _is_missing(value: Any) -> bool:
    """Returns whether a label is None, nan, or the missing value of a library (pandas.NA)."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and math.isnan(value)


def _is_bool(y: Tensor) -> bool:
    return y.dtype == torch.bool and y.layout == torch.strided and not y.is_meta


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _mixed(where: str, values: Sequence[Any]) -> DataError:
    types = sorted({type(value).__name__ for value in values})
    return DataError(
        f"Labels of {where} mix {' and '.join(types)}. Give all of them as text, or as numbers."
    )


def _list_labels(labels: Sequence[str]) -> str:
    """Returns labels as text for a message."""
    shown = ", ".join(repr(label) for label in labels[:LONGEST_LIST])
    more = len(labels) - LONGEST_LIST
    return f"{shown} and {more} more" if more > 0 else shown
