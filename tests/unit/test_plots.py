"""Pictures stay readable however many rows a comparison has."""

import warnings
from pathlib import Path

import pytest

from fedensemble.experiment.compare import RowResult
from fedensemble.report.plots import comparison_figure, save


def results(rows: int) -> list[RowResult]:
    def curve(row: int, seed: int) -> list[dict]:
        return [{"round": r, "test": {"accuracy": 1 - 1 / (r + row + seed + 1)}} for r in range(10, 60, 10)]

    return [
        RowResult(f"a method, number {row}", (), ({}, {}), tuple(curve(row, s) for s in range(2)))
        for row in range(rows)
    ]


@pytest.mark.parametrize("rows", [1, 7, 8, 28, 60])
def test_axes_keep_their_room(rows: int, tmp_path: Path) -> None:
    figure = comparison_figure(results(rows), "accuracy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns when a legend leaves no room
        save(figure, tmp_path / "curves.png")
    box = figure.axes[0].get_position()
    assert box.width > 0.5 and box.height > 0.7


def test_no_two_lines_look_alike() -> None:
    lines = comparison_figure(results(28), "accuracy").axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 28
