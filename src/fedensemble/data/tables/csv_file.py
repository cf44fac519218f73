"""Reads CSV files by Python's own reader.

A file is read in pieces, and twice if a column is text, so that memory holds numbers and not cells.
"""

from __future__ import annotations

import csv
import gzip
from array import array
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from .columns import MISSING, Column, Table, check_header, check_known

ROWS = 2_000  # per piece
Lines = list[tuple[int, list[str]]]  # the number of each line, and its cells


def read_csv(
    file: Path, delimiter: str | None, drop: Collection[str], as_text: Collection[str]
) -> Table:
    """Returns the table of a file whose first line names the columns.

    A column holds numbers if all of its values are numbers, and text otherwise.

    Args:
        file: may be compressed by gzip (.gz).
        delimiter: between cells; None for a comma, or a tab if the name ends in .tsv.
        drop: names of columns that are not read.
        as_text: names of columns whose values are text even if they look like numbers.

    Raises:
        DataError: the file is no table.
    """
    if delimiter is None:
        delimiter = "\t" if file.name.removesuffix(".gz").endswith(".tsv") else ","
    if len(delimiter) != 1:
        raise DataError(f"delimiter must be one character, such as ';'; got {delimiter!r}.")
    try:
        pieces = _pieces(file, delimiter)
        header = next(pieces)[0][1]
        names = [name for name in header if name not in drop]
        check_known(file, drop, header)
        check_header(file, header, names)
        if len(header) == 1 and any(other in header[0] for other in ";\t|"):
            raise DataError(
                f"{file} has one column, '{header[0]}'. If the columns are separated by another "
                f"character than {delimiter!r}, name it, as by delimiter = ';'."
            )
        place = {name: header.index(name) for name in names}
        text = {name for name in names if name in as_text}
        lines, numbers, first_text = _read_numbers(file, pieces, len(header), place, text)
        if not lines:
            raise DataError(f"{file} has no rows below its line of column names.")
        columns = {name: Column(values) for name, values in numbers.items()}
        text |= first_text.keys()
        # Only now it is known which columns hold text.
        columns |= _read_texts(_pieces(file, delimiter), {name: place[name] for name in text})
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{file} cannot be read as a CSV file ({error}). It must be text in UTF-8 with one "
            "line per row."
        ) from None
    mixed = _describe_mixed(columns, first_text)
    ordered = {name: columns[name] for name in names}
    return Table(file, ordered, np.asarray(lines, np.int64), mixed)


def _pieces(file: Path, delimiter: str) -> Iterator[Lines]:
    """Yields the header, and then the rows in pieces, without empty lines."""
    opened = gzip.open if file.suffix == ".gz" else open
    # "utf-8-sig" also reads the byte order mark that spreadsheets write.
    with opened(file, "rt", newline="", encoding="utf-8-sig") as text:
        reader = csv.reader(text, delimiter=delimiter)
        rows = ((reader.line_num, row) for row in reader if row)
        header = next(rows, None)
        if header is None:
            raise DataError(f"{file} is empty. It needs one line of column names.")
        yield [(header[0], [name.strip() for name in header[1]])]
        while piece := list(islice(rows, ROWS)):
            yield piece


def _read_numbers(
    file: Path, pieces: Iterator[Lines], width: int, place: dict[str, int], text: Collection[str]
) -> tuple[array[int], dict[str, NDArray[np.float64]], dict[str, tuple[int, str]]]:
    """Returns the line of each row, the columns of numbers, and the first text of the others.

    Args:
        width: number of columns of the file.
        place: index of each column.
        text: columns that are text, whatever they hold.
    """
    lines = array("q")
    values: dict[str, list[NDArray[np.float64]]] = {n: [] for n in place if n not in text}
    first_text: dict[str, tuple[int, str]] = {}
    for piece in pieces:
        for line, row in piece:
            if len(row) != width:
                raise DataError(
                    f"{file}, line {line}: {len(row)} cells for {width} columns. Correct the line; "
                    "a cell with the delimiter in it must be quoted."
                )
        lines.extend(line for line, _ in piece)
        cells = list(zip(*(row for _, row in piece), strict=True))
        for name in [name for name in values if name not in first_text]:
            parsed = _parse(cells[place[name]])
            if isinstance(parsed, int):
                first_text[name] = (piece[parsed][0], cells[place[name]][parsed].strip())
                continue
            values[name].append(parsed)
    found = {n: np.concatenate(v) for n, v in values.items() if n not in first_text and v}
    return lines, found, first_text


def _parse(cells: tuple[str, ...]) -> NDArray[np.float64] | int:
    """Returns the numbers of a column's cells, or the index of the first that is text."""
    try:
        return np.array(list(map(float, cells)))
    except ValueError:
        pass
    values = np.empty(len(cells))
    for row, cell in enumerate(cells):
        try:
            values[row] = np.nan if cell.strip().lower() in MISSING else float(cell)
        except ValueError:
            return row
    return values


def _read_texts(pieces: Iterator[Lines], place: dict[str, int]) -> dict[str, Column]:
    """Returns the columns of text."""
    if not place:
        return {}
    index: dict[str, dict[str, int]] = {name: {} for name in place}
    codes = {name: array("q") for name in place}
    next(pieces)  # the header
    for piece in pieces:
        for name, at in place.items():
            known, own = index[name], codes[name]
            for _, row in piece:
                cell = row[at].strip()
                own.append(-1 if cell.lower() in MISSING else known.setdefault(cell, len(known)))
    return {
        name: Column(codes=np.asarray(codes[name], np.int64), texts=tuple(index[name]))
        for name in place
    }


def _describe_mixed(
    columns: dict[str, Column], first_text: dict[str, tuple[int, str]]
) -> dict[str, str]:
    """Returns a sentence on each column that was not declared as text and has numbers in it."""
    mixed = {}
    for name, (line, cell) in first_text.items():
        number = next((text for text in columns[name].texts if _is_number(text)), None)
        if number is not None:
            mixed[name] = f"mixes numbers such as {number} with text, '{cell}' in line {line}"
    return mixed


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
