"""Which results of a table are the best."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .result_table import TITLES, TextTable

# Metrics without a direction, such as the entropy or the variance between modes, have no best.
HIGHER_IS_BETTER = {
    "accuracy": True,
    "mode_accuracy_mean": True,
    "mode_accuracy_min": True,
    "mode_accuracy_max": True,
    "nll": False,
    "brier": False,
    "ece": False,
    "mse": False,
    "mode_mse_mean": False,
    "mode_mse_min": False,
    "mode_mse_max": False,
    "adaptive_ece": False,
    "classwise_ece": False,
    "aurc": False,
    "augrc": False,
    "coverage_at_5_risk": True,
    "crps": False,
    "auroc": True,
    "aupr_in": True,
    "aupr_out": True,
    "fpr95": False,
}


def best_places(metric: str, cells: Sequence[str]) -> list[int]:
    """The places of the best cells, by their means as shown; several if they are equal.

    None is best if the metric has no direction, or if all cells are equal.

    >>> best_places("accuracy", ["95.1 ± 0.2", "–", "96.0 ± 0.3"]), best_places("nll", ["1", "2"])
    ([2], [0])
    """
    if metric not in HIGHER_IS_BETTER:
        return []
    means: Mapping[int, float] = {
        place: float(match[0])
        for place, cell in enumerate(cells)
        if (match := re.match(r"-?\d+(\.\d+)?", cell.strip("*")))
    }
    if len(set(means.values())) < 2:
        return []
    best = (max if HIGHER_IS_BETTER[metric] else min)(means.values())
    return [place for place, mean in means.items() if mean == best]


def best_by_column(table: TextTable) -> set[tuple[int, int]]:
    """(row, column) of the best cells of a table with one metric per column."""
    metrics = {title: metric for metric, title in TITLES.items()}
    return {
        (row, column)
        for column, title in enumerate(table.header)
        for row in best_places(metrics.get(title, ""), [cells[column] for cells in table.rows])
    }
