"""The table of methods: paired differences with intervals, evaluations per column, gain curves."""

import math

import numpy as np
import pytest
from scipy import stats

from fedensemble.errors import InputError
from fedensemble.experiment.run import RunCallbacks
from fedensemble.experiment.studies.paper_table import find_paper_table, read_reproduction
from fedensemble.experiment.studies.reproduce import reproduce
from fedensemble.report.figures.method_table import (
    _gain_limits,
    difference,
    gain_curves,
    methods,
    values_by_seed,
)

COLUMNS = ("/ FedAvg", "/ balanced", "/ shared")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    table = find_paper_table("worth-digits")
    settings = ["engine.device=cpu", "rounds=6", "data.clients=20"]
    reproduction = read_reproduction(table, "smoke", settings, seeds=[0, 1])
    root = tmp_path_factory.mktemp("runs")
    callbacks = lambda label, seed: RunCallbacks()  # noqa: E731
    return reproduction, reproduce(reproduction, root, callbacks, lambda: None, COLUMNS)


def test_differences_are_paired_and_have_students_intervals():
    rng = np.random.default_rng(0)
    for count in (2, 3, 7):
        ours, theirs = rng.normal(size=(2, count)).tolist()
        test = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
        mean, half = difference(dict(enumerate(ours)), dict(enumerate(theirs)))
        assert (mean - half, mean + half) == pytest.approx((test.low, test.high), abs=1e-12)
    # Seeds that only one of the methods has do not count, and one seed has no interval.
    mean, half = difference({0: 1.0, 1: 5.0}, {0: 0.5, 2: 9.0})
    assert mean == 0.5 and math.isnan(half)
    assert all(map(math.isnan, difference({0: 1.0}, {1: 1.0})))


def test_a_column_shows_its_own_evaluation_of_a_run_that_others_share(study):
    _, results = study
    by_name = {result.cell.column: result for result in results}
    plain, averaged = by_name["FedAvg"], by_name["FedAvg + EMA"]
    assert plain.runs.folders == averaged.runs.folders
    summaries = averaged.runs.summaries
    assert values_by_seed(plain, "nll") == {
        i: s["test_last"]["nll"] for i, s in enumerate(summaries)
    }
    assert values_by_seed(averaged, "nll") == {i: s["test"]["nll"] for i, s in enumerate(summaries)}


def test_the_table_has_a_line_per_method_and_names_those_ahead(study):
    reproduction, results = study
    report = methods(reproduction, results)
    lines = {line[1]: line for line in report.table.rows}
    known = [result.cell.column for result in results if result.runs is not None]
    assert list(lines) == known and "FedCross + EMA" not in known
    header = report.table.header
    column = header.index("NLL, minus FedAvg + EMA")
    assert lines["FedAvg + EMA"][column] == "–"
    by_name = {result.cell.column: values_by_seed(result, "nll") for result in results}
    gap, half = difference(by_name["balanced + EMA"], by_name["FedAvg + EMA"])
    assert lines["balanced + EMA"][column] == f"{gap:+.3f} ± {half:.3f}"
    (sentence,) = report.notes
    ahead = sentence.split("by the means: ")[1]
    accuracy = {r.cell.column: values_by_seed(r, "accuracy") for r in results if r.runs}
    for name in set(known) - {"FedAvg + EMA"}:
        better = (
            difference(accuracy[name], accuracy["FedAvg + EMA"])[0] > 0
            and difference(by_name[name], by_name["FedAvg + EMA"])[0] < 0
        )
        assert (name in ahead.rstrip(".").split("; ")) == better
    assert set(report.figures) == {"table.png", "gain.png"}
    assert len(report.numbers.rows) == len(known) * 4


def test_gains_are_against_the_baseline_in_the_same_round_and_by_visits_per_mode(study):
    _, results = study
    known = [result for result in results if result.runs is not None]
    (curves,) = gain_curves(known, "FedAvg + EMA", "nll").values()
    assert "FedAvg" not in curves and "balanced" not in curves
    by_name = {result.cell.column: result for result in known}
    ours, theirs = (by_name[n].runs.curves for n in ("balanced + EMA, K = 3", "FedAvg + EMA"))
    rounds = [record["round"] for record in ours[0] if "test" in record]
    visits, gains = curves["balanced + EMA, K = 3"]
    assert visits == [round * 10 / 3 for round in rounds]
    for round, gain in zip(rounds, gains, strict=True):
        nll = [np.mean([r[round - 1]["test"]["nll"] for r in runs]) for runs in (theirs, ours)]
        assert gain == pytest.approx(nll[0] - nll[1], abs=1e-12)


def test_mistakes_in_the_file_are_named(tmp_path):
    table = find_paper_table("worth-digits").read_text()
    base = find_paper_table("worth-digits").parent / "base"
    table = table.replace('"base/', f'"{base}/')
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(table.replace('"shared body + EMA" =', '"shared + EMA" ='))
    with pytest.raises(InputError, match="by_column: unknown column 'shared \\+ EMA'"):
        read_reproduction(wrong, "smoke")
    wrong.write_text(table + '\n[options]\nbaseline = "FedAvgg"\n')
    reproduction = read_reproduction(wrong, "smoke")
    with pytest.raises(InputError, match="baseline must be the label of a column; got 'FedAvgg'"):
        methods(reproduction, [])


def test_a_method_that_fails_does_not_press_the_curves_of_the_others_together():
    low, high = _gain_limits([0.02, 0.016, 0.05, -0.02, -0.9, -1.2])
    assert -0.1 < low < -0.02 and 0.05 < high < 0.1
    assert _gain_limits([0.0, 0.0])[0] < 0 < _gain_limits([0.0, 0.0])[1]
