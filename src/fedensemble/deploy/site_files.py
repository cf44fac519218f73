"""Reads a site's examples, or the server's test set, from a file: .npz or .csv."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..data.schema import Schema
from ..data.sources.npz import read_arrays
from ..errors import DataError


def read_examples(file: Path, schema: Schema) -> tuple[Any, Any]:
    """Returns inputs [n, ...] and targets [n, ...] of a file; raises FileNotFoundError without it.

    Args:
        file: an .npz file with the arrays x and y, or a .csv file with one line of column names.
        schema: names the columns of a .csv file.
    """
    if file.suffix.lower() not in (".npz", ".csv"):
        raise DataError(f"{file} must be an .npz or a .csv file; write load() for other files.")
    if file.suffix.lower() == ".csv":
        return _read_csv(file, schema)
    arrays = read_arrays(file, {"x": "x", "y": "y"})
    return arrays["x"], arrays["y"]


def _read_csv(file: Path, schema: Schema) -> tuple[Any, Any]:
    # "utf-8-sig" also reads the byte order mark that spreadsheets write.
    with file.open(newline="", encoding="utf-8-sig") as opened:
        lines = list(csv.reader(opened))
    if len(lines) < 2:
        raise DataError(f"{file} needs one line of column names and one line per example.")
    header, *rows = lines
    target = schema.target or header[-1]
    columns = schema.columns or [name for name in header if name != target]
    for name in (*columns, target):
        if name not in header:
            raise DataError(f"{file} has no column '{name}'. It has {', '.join(header)}.")
    # Columns are found by their names, so that files with another order of columns are read right.
    places = [header.index(name) for name in columns]
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise DataError(f"{file}, line {number}: {len(row)} values for {len(header)} columns.")
    inputs = _numbers(file, rows, places, header)
    x = inputs.astype(np.int64) if schema.dtype == "int64" else inputs
    place = header.index(target)
    if schema.class_names is not None and any(row[place] in schema.class_names for row in rows):
        return x, [row[place] for row in rows]
    y = _numbers(file, rows, [place], header)[:, 0]
    return x, y if schema.classes is None else _labels(file, y)


def _numbers(
    file: Path, rows: Sequence[Sequence[str]], places: Sequence[int], header: Sequence[str]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.empty((len(rows), len(places)))
    for line, row in enumerate(rows):
        for column, place in enumerate(places):
            try:
                values[line, column] = float(row[place])
            except ValueError:
                raise DataError(
                    f"{file}, line {line + 2}: '{row[place]}' in column '{header[place]}' is not a "
                    "number."
                ) from None
    return values


def _labels(
    file: Path, values: np.ndarray[Any, np.dtype[np.float64]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    labels = values.astype(np.int64)
    if (wrong := np.flatnonzero(labels != values)).size:
        raise DataError(
            f"{file}, line {wrong[0] + 2}: {values[wrong[0]]} is not the number of a class."
        )
    return labels
