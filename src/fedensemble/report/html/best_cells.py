"""Finds the best cells of a table of results."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..figures.paper_grid import GAP, PAPER, WAYS
from ..tables.result_table import TITLES, TextTable

# Of the ensemble only: the worst of several modes cannot be compared with a single model.
HIGHER, LOWER = {"accuracy"}, {"nll", "brier", "ece", "mse"}


def best_cells(table: TextTable, metric: str) -> set[tuple[int, int]]:
    """Row and column of the best cells; column 0 as well of the rows that are best in `metric`.

    A comparison has one row per method, so the best cell of a column is marked. A table of a paper
    has one column per method, so the best cell of a row is marked.
    """
    if is_paper_table(table):
        return _best_in_rows(table, metric)
    found = set()
    for column, title in enumerate(table.header):
        name = _metric_of(title.partition(", mean of last")[0])
        best = _best(name, ((at, row[column]) for at, row in enumerate(table.rows)))
        found |= {(at, column) for at in best}
        if name == metric and title == TITLES[name]:
            found |= {(at, 0) for at in best}
    return found


def is_paper_table(table: TextTable) -> bool:
    """Whether the methods are the columns of a table, as in a paper, and not its rows."""
    return table.header[:2] == ("", "evaluation")


def _best_in_rows(table: TextTable, metric: str) -> set[tuple[int, int]]:
    columns = [at for at, title in enumerate(table.header) if at > 1 and title != GAP]
    found = set()
    for at, row in enumerate(table.rows):
        if row[1] in {*WAYS.values(), PAPER}:
            # If the table has several metrics, the label of a row ends with the title of one.
            name = _metric_of(row[0].rpartition(", ")[2]) or metric
            found |= {(at, column) for column in _best(name, ((c, row[c]) for c in columns))}
    return found


def _metric_of(title: str) -> str:
    return next((name for name, known in TITLES.items() if known == title), "")


def _best(metric: str, cells: Iterable[tuple[int, str]]) -> set[int]:
    """The places of the best numbers; none if there is nothing to choose from."""
    numbers = {at: float(m[0]) for at, text in cells if (m := re.match(r"-?\d+(\.\d+)?", text))}
    if len(numbers) < 2 or metric not in HIGHER | LOWER:
        return set()
    best = max(numbers.values()) if metric in HIGHER else min(numbers.values())
    return {at for at, value in numbers.items() if value == best}
