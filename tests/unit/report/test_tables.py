"""Tables say what the last tests were on average, and which runs shared their time."""

import pytest

from fedensemble.experiment.studies.compare import RowResult
from fedensemble.report.html.best_cells import best_cells
from fedensemble.report.seed_curves import curve_over_seeds, rounds_with_tests, visible_range
from fedensemble.report.tables.result_table import (
    TextTable,
    batch_size,
    comparison_table,
    run_table,
)


def records(*accuracies: float) -> list[dict]:
    return [
        {"round": 10 * at, "loss": 0.1, "test": {"accuracy": value, "nll": 1 - value}}
        for at, value in enumerate(accuracies, 1)
    ]


def summary(last: float, together: int = 1) -> dict:
    return {
        "name": "x",
        "modes": 1,
        "rounds": 60,
        "bytes_up": 2e6,
        "bytes_down": 1e6,
        "seconds": 3.0,
        "trained_together": together,
        "test": {"accuracy": last, "nll": 1 - last},
    }


def row(label: str, *curves: list[dict], together: int = 1) -> RowResult:
    summaries = tuple(summary(curve[-1]["test"]["accuracy"], together) for curve in curves)
    return RowResult(label, (), summaries, tuple(curves))


def cells(table: TextTable, label: str) -> dict[str, str]:
    (found,) = (row for row in table.rows if row[0] == label)
    return dict(zip(table.header, found, strict=True))


def test_the_last_test_stands_beside_the_mean_of_the_last_ones() -> None:
    drops = records(0.1, 0.9, 0.9, 0.9, 0.9, 0.5)
    steady = records(0.1, 0.7, 0.7, 0.7, 0.7, 0.7)
    table = comparison_table([row("drops", drops, drops), row("steady", steady)], "accuracy")
    found = cells(table, "drops")
    assert found["accuracy %"] == "50.00 ± 0.00"
    assert found["accuracy %, mean of last 5 tests"] == "82.00 ± 0.00"
    assert cells(table, "steady")["accuracy %, mean of last 5 tests"] == "70.00"


def test_the_run_with_fewest_tests_decides_how_many_are_averaged() -> None:
    table = comparison_table(
        [row("a", records(0.2, 0.4, 0.6, 0.8)), row("b", records(0.5, 0.7))], "accuracy"
    )
    assert cells(table, "a")["accuracy %, mean of last 2 tests"] == "70.00"
    single = comparison_table([row("a", records(0.2))], "accuracy")
    assert not [title for title in single.header if "mean of last" in title]


def test_runs_trained_together_are_marked() -> None:
    alone = comparison_table([row("a", records(0.5))], "accuracy")
    assert "runs per batch" not in alone.header and "share" not in alone.title
    mixed = [row("a", records(0.5)), row("b", records(0.5), together=12)]
    table = comparison_table(mixed, "accuracy")
    assert cells(table, "a")["runs per batch"] == "1"
    assert cells(table, "b")["runs per batch"] == "12"
    assert table.title.endswith("the time of runs trained in one batch is each run's share")
    assert batch_size([summary(0.5, 1), summary(0.5, 4)]) == "1 to 4"
    assert batch_size([{"seconds": 1.0}]) == "–"  # a run of an earlier version


def test_the_table_of_a_run_has_both_columns() -> None:
    table = run_table(summary(0.5), records(0.9, 0.9, 0.5))
    assert table.header == ("metric", "standard evaluation", "mean of last 3 tests")
    assert cells(table, "accuracy %")["mean of last 3 tests"] == "76.67"
    assert cells(table, "uploaded, MB")["standard evaluation"] == "2.0"
    assert run_table(summary(0.5)).header == ("metric", "standard evaluation")


def test_curves_over_seeds_cope_with_a_run_that_has_fewer_tests() -> None:
    runs = [records(0.2, 0.4), records(0.4)]
    assert rounds_with_tests(runs) == [10, 20]
    mean, spread = curve_over_seeds(runs, "accuracy", [[10], [20], [30]])
    assert mean[:2] == pytest.approx([30, 40]) and mean[2] != mean[2]
    assert spread == pytest.approx([100 * 0.2 / 2**0.5, 0, 0])
    assert curve_over_seeds(runs, "accuracy", [[10, 20]])[0] == pytest.approx([35])


def test_first_rounds_do_not_take_the_whole_axis() -> None:
    shown, everything = visible_range([[0.0, 90, 91, 92, 93, 94, 95, 96]])
    assert not everything and shown == [pytest.approx(91 - 5 / 4), 96]
    assert visible_range([[90.0, 91, 92, 93]]) == ([90, 91, 92, 93], True)


def test_best_cells_of_a_comparison() -> None:
    header = ("method", "accuracy %", "accuracy %, mean of last 5 tests", "worst mode %", "NLL")
    rows = (
        ("a", "90.00 ± 1.00", "91.00", "99.00", "0.200"),
        ("b", "95.00 ± 1.00", "90.00", "80.00", "0.300"),
        ("c", "–", "–", "–", "–"),
    )
    table = TextTable("", header, rows)
    # the row of the best accuracy; of NLL the smallest; the worst of several modes is no result
    assert best_cells(table, "accuracy") == {(1, 0), (1, 1), (0, 2), (0, 4)}
    assert best_cells(TextTable("", header, rows[:1]), "accuracy") == set()


def test_best_cells_of_a_table_of_a_paper() -> None:
    rows = (
        ("iid", "standard", "91.00", "92.00", "1.00"),
        ("iid", "paper", "95.5 ± 0.2", "–", "–"),
        ("iid", "uploaded, MB", "10.0", "20.0", "–"),
    )
    table = TextTable("", ("", "evaluation", "A", "B", "gap"), rows)
    assert best_cells(table, "accuracy") == {(0, 3)}
    assert best_cells(table, "mse") == {(0, 2)}
