"""Figures stay readable with many rows, tests and clients, and say what they show."""

import warnings
from pathlib import Path

import pytest
import torch

from fedensemble import FederatedData
from fedensemble.experiment.studies.compare import RowResult
from fedensemble.report.data_report import write_data_report
from fedensemble.report.figures.plots import (
    SPREAD,
    comparison_figure,
    partition_figure,
    run_figure,
    save,
)


def results(rows: int, tests: int = 5, seeds: int = 2) -> list[RowResult]:
    def curve(row: int, seed: int) -> list[dict]:
        rounds = range(10, 10 * (tests + 1), 10)
        return [{"round": r, "test": {"accuracy": 1 - 1 / (r + row + seed + 1)}} for r in rounds]

    return [
        RowResult(
            f"a method, number {row}", (), ({}, {}), tuple(curve(row, s) for s in range(seeds))
        )
        for row in range(rows)
    ]


def run_records(tests: int) -> list[dict]:
    made = torch.Generator().manual_seed(0)
    rates = torch.rand(tests, 3, generator=made).sort(1).values.tolist()
    return [
        {
            "round": at + 1,
            "loss": 1 / (at + 1),
            "test": {
                "accuracy": mean,
                "mode_accuracy_min": low,
                "mode_accuracy_mean": mean,
                "mode_accuracy_max": high,
            },
        }
        for at, (low, mean, high) in enumerate(rates)
    ]


def clients(count: int, classes: int = 3) -> FederatedData:
    """Client c holds c + 1 examples of a class."""
    size = torch.arange(1, count + 1)
    label = torch.repeat_interleave(torch.arange(count) % classes, size)
    return FederatedData(
        x=torch.zeros(len(label), 1),
        y=label,
        start=size.cumsum(0) - size,
        size=size,
        classes=classes,
        info={"source": "made up", "partition": "iid"},
    )


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


def test_few_tests_are_all_marked() -> None:
    training, tested = run_figure(run_records(20), "short").axes
    *_, ensemble = tested.get_lines()
    assert ensemble.get_marker() == "o" and len(ensemble.get_xdata()) == 20
    assert tested.get_xlabel() == training.get_xlabel() == "round"


def test_many_tests_are_averaged_without_marks() -> None:
    records = run_records(400)
    training, tested = run_figure(records, "long").axes
    mean, ensemble = tested.get_lines()
    # 57 times 7 tests, and the first
    assert len(mean.get_xdata()) == len(ensemble.get_xdata()) == 58
    assert ensemble.get_marker() not in ("o", ".") and ensemble.get_xdata()[-1] == 400
    last = sum(record["test"]["accuracy"] for record in records[-7:]) / 7
    assert ensemble.get_ydata()[-1] == pytest.approx(100 * last)
    assert (
        "mean of the 7 tests" in tested.get_xlabel()
        and "mean of the 2 rounds" in training.get_xlabel()
    )


@pytest.mark.parametrize(("tests", "points"), [(60, 60), (61, 31), (400, 58)])
def test_comparisons_are_averaged_too(tests: int, points: int) -> None:
    axes = comparison_figure(results(2, tests), "accuracy").axes[0]
    assert {len(line.get_xdata()) for line in axes.get_lines()} == {points}
    assert ("Each point" in axes.get_xlabel()) == (points < tests)


@pytest.mark.parametrize(("seeds", "rows", "said"), [(2, 2, True), (1, 2, False), (2, 8, False)])
def test_bands_are_explained_where_there_are_any(seeds: int, rows: int, said: bool) -> None:
    figure = comparison_figure(results(rows, seeds=seeds), "accuracy")
    assert (SPREAD in figure.axes[0].get_legend_handles_labels()[1]) == said


@pytest.mark.parametrize(
    ("count", "legend"), [(1, ["1"]), (4, ["1", "2", "3", "4"]), (100, ["25", "50", "75", "100"])]
)
def test_partitions_tell_their_counts_and_no_client_too_many(
    count: int, legend: list[str], tmp_path: Path
) -> None:
    figure = partition_figure(clients(count))
    save(figure, tmp_path / "p.png")
    axes = figure.axes[0]
    assert axes.get_legend_handles_labels()[1] == legend
    low, high = axes.get_xlim()
    shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert shown and all(tick == int(tick) and 0 <= tick < count for tick in shown)
    assert f"{count * (count + 1) // 2:,} examples" in axes.get_title()


def test_a_partition_is_drawn_only_where_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tables, said = write_data_report(clients(4), None)
    assert len(tables) == 2 and "-o partition.png" in said and not list(tmp_path.iterdir())
    _, said = write_data_report(clients(4), Path("p.png"))
    assert said == "Picture: p.png" and [path.name for path in tmp_path.iterdir()] == ["p.png"]
    targets = FederatedData(
        x=torch.zeros(4, 1),
        y=torch.zeros(4, 1),
        start=torch.tensor([0, 2]),
        size=torch.tensor([2, 2]),
        info={},
    )
    _, said = write_data_report(targets, Path("q.png"))
    assert said.startswith("No picture") and not Path("q.png").exists()
