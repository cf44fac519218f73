"""A table in memory: columns of numbers or of texts, with missing values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, unknown

# Cells that stand for no value, in lower case.
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})


@dataclass(frozen=True, eq=False)
class Column:
    """A column of numbers, or of texts.

    Args:
        numbers: values of a column of numbers, float64 [n]; nan is a missing value.
        codes: the index into `texts` of each row of a column of texts, [n]; -1 is a missing value.
        texts: the different texts.
    """

    numbers: NDArray[np.float64] | None = None
    codes: NDArray[np.int64] | None = None
    texts: tuple[str, ...] = ()

    @property
    def missing(self) -> NDArray[np.bool_]:
        """Which rows have no value, [n]."""
        if self.codes is not None:
            return self.codes < 0
        assert self.numbers is not None
        return np.isnan(self.numbers)

    def take(self, rows: NDArray[np.int64]) -> Column:
        """Returns the column with these rows."""
        return Column(
            None if self.numbers is None else self.numbers[rows],
            None if self.codes is None else self.codes[rows],
            self.texts,
        )

    def sorted_texts(self) -> tuple[Sequence[str], NDArray[np.int64]]:
        """Returns the texts that occur, sorted, and the index of each row's text in them.

        Whole numbers are texts without a decimal point, in the order of numbers. All values must be
        present.
        """
        if self.numbers is not None:
            values, codes = np.unique(self.numbers, return_inverse=True)
            whole = bool((values == np.floor(values)).all())
            return [str(int(v)) if whole else str(v) for v in values.tolist()], codes
        assert self.codes is not None
        used = np.unique(self.codes).tolist()
        try:
            order = sorted(used, key=lambda code: (float(self.texts[code]), self.texts[code]))
        except ValueError:  # not all of them are numbers
            order = sorted(used, key=lambda code: self.texts[code])
        place = np.zeros(len(self.texts), np.int64)
        place[order] = np.arange(len(order))
        return [self.texts[code] for code in order], place[self.codes]


def concatenate(parts: Sequence[Column]) -> Column:
    """Returns the rows of several columns of the same kind, one after the other."""
    if parts[0].numbers is not None:
        return Column(np.concatenate([part.numbers for part in parts if part.numbers is not None]))
    texts = tuple(dict.fromkeys(text for part in parts for text in part.texts))
    index = {text: code for code, text in enumerate(texts)}
    codes = []
    for part in parts:
        assert part.codes is not None
        # The last entry is for missing values, whose code is -1.
        renumbered = np.array([*(index[text] for text in part.texts), -1], np.int64)
        codes.append(renumbered[part.codes])
    return Column(codes=np.concatenate(codes), texts=texts)


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a file by name.

    Args:
        file: that it was read from, for messages.
        columns: by name, in the order of the file, all of one length.
        lines: the line of each row in the file; None if the file has no lines.
        mixed: columns of texts some of which are numbers, by name, with a sentence on both.
    """

    file: Path
    columns: Mapping[str, Column]
    lines: NDArray[np.int64] | None = None
    mixed: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())).missing)

    def place(self, row: int) -> str:
        """Returns where a row is, for messages: "line 12", or "row 10" of a file without lines."""
        return f"row {row}" if self.lines is None else f"line {int(self.lines[row])}"

    def take(self, rows: NDArray[np.int64]) -> Table:
        """Returns the table with these rows."""
        columns = {name: column.take(rows) for name, column in self.columns.items()}
        lines = None if self.lines is None else self.lines[rows]
        return Table(self.file, columns, lines, self.mixed)


def check_known(file: Path, names: Iterable[str], known: Sequence[str]) -> None:
    """Raises unless the file has columns of these names."""
    for name in names:
        if name not in known:
            raise DataError(f"{file}: {unknown('column', name, known)}")


def check_header(file: Path, names: Sequence[str], read: Sequence[str]) -> None:
    """Raises unless the columns that are read have names of their own."""
    if "" in read:
        raise DataError(
            f"Column {names.index('') + 1} of {file} has no name. If it is the index that pandas "
            "writes, write the file by to_csv(index=False), or leave the column out by drop = [''];"
            " otherwise give it a name."
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"Two columns of {file} are called '{twice}'; rename one of them.")
