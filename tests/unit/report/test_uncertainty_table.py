"""The tables of uncertainty: paired differences, means over corruptions, plain verdicts."""

import csv
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedensemble.errors import InputError
from fedensemble.experiment.run import RunCallbacks
from fedensemble.experiment.storage.read_json import read_table
from fedensemble.experiment.studies.paper_table import find_paper_table, read_reproduction
from fedensemble.experiment.studies.reproduce import reproduce, test_shift, without_missing
from fedensemble.experiment.studies.shift_test import ShiftTest, read_shift
from fedensemble.report.figures.uncertainty_table import (
    Study,
    collect_values,
    compare_methods,
    title_of,
    uncertainty,
)
from fedensemble.report.reproduction_report import write_reproduction

COLUMNS = ("FedAvg", "MC-dropout", "Fed-ensemble", "same bytes")
SMALL = ["engine.device=cpu", "rounds=2", "data.n=60", "model.dropout=0.2"]
test_shift.__test__ = False  # a function of the package, not a test


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    table = find_paper_table("uncertainty-mnist")
    reproduction = without_missing(
        read_reproduction(table, "smoke", SMALL), tmp_path_factory.mktemp("runs")
    )
    root = tmp_path_factory.mktemp("runs")
    callbacks = lambda label, seed: RunCallbacks()  # noqa: E731
    results = reproduce(reproduction, root, callbacks, lambda: None, COLUMNS)
    said: list[str] = []
    test_shift(results, COLUMNS, said.append)
    return reproduction, results, root, said


def by_name(results):
    return {result.cell.column: result for result in results if result.runs is not None}


def test_selected_cells_are_trained_and_tested_and_others_are_left_out(study):
    _, results, _, said = study
    known = by_name(results)
    assert list(known) == [
        "FedAvg", "FedAvg + EMA", "MC-dropout", "Fed-ensemble", "apart + EMA, same bytes",
    ]  # fmt: skip
    # The made-up images of each seed are others.
    assert sum("corrupted images made" in line for line in said) == 2
    assert sum("tested on shifted inputs" in line for line in said) == 2 * len(known)
    # Two ways of testing the same runs.
    assert known["FedAvg"].runs.folders == known["FedAvg + EMA"].runs.folders
    again: list[str] = []
    test_shift(results, COLUMNS, again.append)
    assert again == []


def test_each_run_is_tested_on_the_test_set_of_its_seed(study):
    result = by_name(study[1])["Fed-ensemble"]
    shift = result.cell.shift
    for config, folder in zip(result.cell.configs, result.runs.folders, strict=True):
        before = read_shift(folder, shift, "test")
        (folder / "shift.json").unlink()
        ShiftTest(lambda text: None).test("alone", config, folder, shift, "test")
        assert read_shift(folder, shift, "test") == before


def test_means_over_corruptions_and_severities(study):
    result = by_name(study[1])["Fed-ensemble"]
    values = collect_values(result)
    for seed, folder in zip((0, 1), result.runs.folders, strict=True):
        entries = read_table(folder / "shift.json").values()
        table = next(e for e in entries if e["kind"] == "corruptions")["result"]["metrics"]
        cells = np.array([[table[c][s]["nll"] for s in "12345"] for c in table])
        assert cells.shape == (14, 5)
        assert values["corrupted/nll"][seed] == pytest.approx(cells.mean())
        assert values["severity 4/nll"][seed] == pytest.approx(cells[:, 3].mean())
        assert values["fog/nll"][seed] == pytest.approx(np.mean([*cells[list(table).index("fog")]]))
        assert values["nll"][seed] == read_table(folder / "summary.json")["test"]["nll"]


def test_differences_are_paired_with_students_intervals(study):
    found = Study(study[0], study[1])
    ours = by_name(study[1])["Fed-ensemble"]
    for metric in ("nll", "corrupted/ece", "CIFAR10/energy/auroc"):
        a = list(found.metric(ours, metric).values())
        b = list(found.values["MNIST", "FedAvg + EMA"][metric].values())
        interval = stats.ttest_rel(a, b).confidence_interval(0.95)
        mean, half = found.gap(ours, metric, "FedAvg + EMA")
        assert (mean - half, mean + half) == pytest.approx((interval.low, interval.high))
    assert all(map(math.isnan, found.gap(ours, "nll", "FedBE-noKD")))


def made_up(study, values):
    """The study with other values of our method and of the references."""
    found = Study(study[0], study[1])
    found.values = {("MNIST", name): metrics for name, metrics in values.items()}
    return found


def test_verdicts_follow_from_intervals(study):
    ours = {
        "accuracy": {0: 0.90, 1: 0.92, 2: 0.94},
        "nll": {0: 0.2, 1: 0.3, 2: 0.4},
        "ece": {0: 0.05, 1: 0.01, 2: 0.03},
        "corrupted/nll": {0: 1.0, 1: 1.0, 2: 1.0},
    }
    theirs = {
        "accuracy": {0: 0.88, 1: 0.90, 2: 0.9201},  # two points below, in each seed
        "nll": {0: 0.1, 1: 0.2, 2: 0.3001},  # lower is better
        "ece": {0: 0.02, 1: 0.03, 2: 0.03},
        "corrupted/nll": {0: 2.0, 1: 2.0, 2: 1.9},
    }
    found = made_up(study, {"Fed-ensemble": ours, "FedAvg + EMA": theirs})
    (sentence,) = compare_methods(found, "MNIST")
    assert sentence == (
        "- MNIST, Fed-ensemble against FedAvg + EMA: better in accuracy, cNLL; worse in NLL; "
        "no clear difference in ECE. cNLL 0.51 times that of FedAvg + EMA."
    )
    # One seed has no interval; its differences count as they are.
    single = {name: {metric: {0: v[0]} for metric, v in values.items()} for name, values in (
        ("Fed-ensemble", ours), ("MC-dropout", theirs))}  # fmt: skip
    (sentence,) = compare_methods(made_up(study, single), "MNIST")
    assert "better in accuracy, cNLL; worse in NLL, ECE." in sentence
    assert compare_methods(made_up(study, {"MC-dropout": theirs}), "MNIST") == []


def test_the_page_and_its_numbers(study, tmp_path):
    reproduction, results, root, _ = study
    table = write_reproduction(tmp_path, reproduction, results, root, 1.0, [])
    page = (tmp_path / "table.md").read_text()
    assert len(table.rows) == 5 and {row[1] for row in table.rows} == set(by_name(results))
    assert "| MNIST → Fashion-MNIST | MC-dropout |" in page and "frost, the 15th" in page
    assert "### Where the ensemble is better, and where not" in page
    assert "(20 of MNIST)" in page and "Without numbers (not run yet)" in page
    models = {row[1]: row[-2] for row in table.rows}
    assert models["FedAvg"] == "1" and models["MC-dropout"] == "3"
    text = (tmp_path / "table.csv").read_text()
    numbers = list(csv.DictReader(text.splitlines()))
    own = {r["metric"]: r for r in numbers if r["method"] == "MC-dropout"}
    # Clean, all, by severity and by corruption; two sets out of distribution by five scores.
    assert len(own) == 3 * (1 + 1 + 5 + 14) + 2 * 5 * 4
    assert own["Fashion-MNIST/energy/fpr95"]["seeds"] == "2"
    by_seed = read_table(tmp_path / "values.json")["MNIST"]["MC-dropout"]["corrupted/nll"]
    mean = float(own["corrupted/nll"]["mean"])
    assert list(by_seed) == ["0", "1"] and np.mean([*by_seed.values()]) == pytest.approx(mean)
    first = (tmp_path / "table.md").read_bytes()
    assert (tmp_path / "severity.png").is_file() and (tmp_path / "ood.png").is_file()
    write_reproduction(tmp_path, reproduction, results, root, 9.0, [])
    assert (tmp_path / "table.md").read_bytes() == first


def test_runs_that_were_not_tested_have_dashes(study):
    reproduction, results, _, _ = study
    untested = [replace(r, cell=replace(r.cell, shift=None)) for r in results]
    report = uncertainty(reproduction, untested)
    assert len(report.table.rows) == 5 and not report.figures
    assert not any("corruptions" in note for note in report.notes)


def test_names_of_methods_are_checked(study):
    table = study[0].table.model_copy(update={"options": {"baseline": "FedAvg", "ours": "mine"}})
    with pytest.raises(InputError, match="'mine'"):
        uncertainty(replace(study[0], table=table), study[1])


def test_titles():
    assert title_of("ece") == "ECE %" and title_of("corrupted/accuracy") == "cA %"
    assert title_of("fog/nll") == "NLL under fog"


def test_the_full_study_has_all_rows_with_their_shifted_inputs():
    whole = read_reproduction(find_paper_table("uncertainty"), "full", ["engine.device=cpu"])
    labels = {cell.label for cell in whole.cells}
    assert len(labels) == len(whole.cells) == 15
    for cell in whole.cells:
        assert len(cell.configs) == 3 and cell.shift is not None
        expected = {"MNIST": ["Fashion-MNIST", "CIFAR10"], "CIFAR10": ["MNIST"]}[cell.row]
        assert list(cell.shift.ood) == expected and cell.shift.corrupted_images >= 1000
    samples = [c.configs[0].ensemble.dropout_samples for c in whole.cells]
    assert [s for s in samples if s] == [10, 10]


def test_shift_of_an_unknown_row_is_an_error(tmp_path):
    file = find_paper_table("uncertainty-mnist")
    text = file.read_text().replace("scale.smoke.shift.MNIST", "scale.smoke.shift.Mnist")
    text = text.replace('"base/', f'"{file.parent}/base/')
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(InputError, match="Mnist"):
        read_reproduction(tmp_path / "mine.toml", "smoke")
