"""The paper's tables and figures: their files, their runs, and the written results."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from fedensemble.errors import InputError
from fedensemble.experiment.run import RunCallbacks
from fedensemble.experiment.studies.compare import read_comparison
from fedensemble.experiment.studies.paper_table import (
    NAMES,
    find_paper_table,
    papers_folder,
    read_reproduction,
)
from fedensemble.experiment.studies.reproduce import reproduce, without_missing
from fedensemble.report.figures.paper_grid import grid, headline, over_seeds, paper_number
from fedensemble.report.reproduction_report import REPORTS, write_reproduction
from fedensemble.report.results_page import BEGIN, END, collect
from fedensemble.theory.bias_variance import limit_variance

BASE = """
name = "tiny"
rounds = 4
[data]
source = "gaussians"
n = 60
n_test = 30
clients = 6
[model]
name = "mlp"
hidden = [4]
[ensemble]
modes = 2
strata = 3
clients_per_round = 3
[evaluation]
every = 2
"""
TABLE = """
name = "mine"
title = "Mine"
base = "base.toml"
seeds = [0, 1]
gap = ["two", "one"]
[[row]]
label = "easy"
set = { "data.separation" = 8.0 }
[[row]]
label = "hard"
seeds = [3]
columns = ["one"]
set = { "data.separation" = 0.5 }
[[column]]
label = "one"
set = { "ensemble.modes" = 1, "ensemble.strata" = 1 }
[[column]]
label = "two"
[paper.easy]
one = "90.5 ± 0.5"
gap = "1.5"
[scale.full]
[scale.smoke]
set = { rounds = 2 }
column_seeds = { "two" = [1] }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "mine.toml").write_text(TABLE)
    return tmp_path / "mine.toml"


def carry_out(reproduction, root, only=()):
    return reproduce(reproduction, root, lambda label, seed: RunCallbacks(), lambda: None, only)


@pytest.mark.parametrize("path", sorted(papers_folder().glob("*.toml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("scale", ["smoke", "full"])
def test_every_file_is_valid_at_both_scales(path, scale):
    reproduction = read_reproduction(path, scale, ["engine.device=cpu"])
    assert reproduction.name == path.stem
    assert reproduction.table.report in REPORTS
    assert [cell for cell in reproduction.cells if not cell.skipped]
    columns, rows = (
        {getattr(cell, what) for cell in reproduction.cells} for what in ("column", "row")
    )
    # the paper's numbers belong to what is there
    if scale == "full" and reproduction.table.report == "grid":
        metrics = set(reproduction.table.shown)
        assert set(reproduction.table.paper) <= rows | metrics
        assert {
            name for given in reproduction.table.paper.values() for name in given
        } <= columns | {"gap"}
    if scale == "smoke":
        tables = [config.data for cell in reproduction.cells for config in cell.configs]
        # "rotated" turns the images of another dataset.
        datasets = {table.get("images", table["source"]) for table in tables}
        # nothing to download
        assert datasets <= {"sine", "circle", "digits", "stand-in-images", "stand-in-text"}
        # and nothing that could be taken for the real data
        assert reproduction.note or datasets <= {"sine", "circle"}


def test_all_names_have_a_file():
    for name in NAMES:
        assert find_paper_table(name).is_file()
    with pytest.raises(InputError, match="did you mean 'table1'"):
        find_paper_table("tabel1")


def test_settings_lie_between_scale_and_rows(file):
    full = read_reproduction(file, "full", ["engine.device=cpu"])
    assert [cell.label for cell in full.cells] == ["easy / one", "easy / two", "hard / one"]
    assert [[config.seed for config in cell.configs] for cell in full.cells] == [
        [0, 1],
        [0, 1],
        [3],
    ]
    assert [cell.configs[0].ensemble.modes for cell in full.cells] == [1, 2, 1]
    smoke = read_reproduction(file, "smoke", ["ensemble.modes=3"])
    assert [config.seed for config in smoke.cells[1].configs] == [1]
    assert [cell.configs[0].ensemble.modes for cell in smoke.cells] == [1, 3, 1]
    assert {cell.configs[0].rounds for cell in smoke.cells} == {2}
    assert {c.configs[0].rounds for c in read_reproduction(file, "smoke", ["rounds=7"]).cells} == {
        7
    }
    assert {
        config.seed
        for cell in read_reproduction(file, "full", [], [5]).cells
        for config in cell.configs
    } == {5}
    with pytest.raises(InputError, match="scale 'ful'"):
        read_reproduction(file, "ful")


def test_pieces_come_to_the_same_bytes_as_the_whole(file, tmp_path):
    whole = read_reproduction(file, "full", ["engine.device=cpu"])
    write_reproduction(
        tmp_path / "whole", whole, carry_out(whole, tmp_path / "a"), tmp_path / "a", 2.0, []
    )
    first = carry_out(whole, tmp_path / "b", ["EASY / one"])
    assert [result.runs is None for result in first] == [False, True, True]
    partly = write_reproduction(tmp_path / "pieces", whole, first, tmp_path / "b", 2.0, [])
    assert "not run yet" in (tmp_path / "pieces" / "table.md").read_text()
    assert {line[0] for line in partly.rows} == {"easy"}  # the other row has no lines of dashes
    assert len(grid(whole, first).figures["table.png"].axes) == 1
    results = carry_out(whole, tmp_path / "b", ["two", "hard"])
    paths = [str(path) for path in results[1].runs.folders]
    table = write_reproduction(tmp_path / "pieces", whole, results, tmp_path / "b", 2.0, paths)
    names = ("table.md", "table.csv", "table.tex", "references.bib", "runs.json")
    for name in (*names, "table.png", "table.pdf", "table.svg"):
        assert (tmp_path / "pieces" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes(), name
    assert table.header == ("", "evaluation", "one", "two", "gap")
    ours = [np.mean(over_seeds(results[place].runs, "accuracy", "test")) for place in (0, 1)]
    assert table.rows[0][-1] == f"{100 * (ours[1] - ours[0]):.2f}"
    assert table.rows[1] == ("easy", "paper", "90.5 ± 0.5", "–", "1.5")
    runs = list(csv.DictReader((tmp_path / "pieces" / "runs.csv").read_text().splitlines()))
    assert [(run["row"], run["column"], run["seed"]) for run in runs] == [
        ("easy", "one", "0"),
        ("easy", "one", "1"),
        ("easy", "two", "0"),
        ("easy", "two", "1"),
        ("hard", "one", "3"),
    ]
    assert np.mean([float(run["accuracy"]) for run in runs[:2]]) == ours[0]
    # the better of the two columns, in the line of our results only
    tex = (tmp_path / "pieces" / "table.tex").read_text()
    best = r"\textbf{" + table.rows[0][2 + int(ours[1] > ours[0])].replace("±", r"$\pm$") + "}"
    assert best in tex and tex.count(r"\textbf") == 1
    told = json.loads((tmp_path / "pieces" / "results.json").read_text())
    # 2 seeds x 4 rounds x 3 clients of 10 examples, one epoch
    assert told["sittings"][-1]["samples"] == 240
    assert told["sittings"][-1]["samples_per_second"] == 120
    with pytest.raises(InputError, match="--only"):
        carry_out(whole, tmp_path / "b", ["nothing of the kind"])


def test_a_comparison_file_with_columns_is_reproduced_as_it_is(file, tmp_path):
    """It needs neither a title nor scales."""
    text = TABLE.partition("[paper.easy]")[0]
    for line in (
        'title = "Mine"\n',
        'gap = ["two", "one"]\n',
        "seeds = [3]\n",
        'columns = ["one"]\n',
    ):
        assert line in text
        text = text.replace(line, "")
    file.write_text(text)
    labels = [row.label for row in read_comparison(file, ["engine.device=cpu"]).rows]
    assert labels == ["easy, one", "easy, two", "hard, one", "hard, two"]
    reproduction = read_reproduction(file, settings=["engine.device=cpu"])
    assert [cell.label.replace(" / ", ", ") for cell in reproduction.cells] == labels
    assert headline(reproduction) == "mine"
    with pytest.raises(InputError, match="unknown scale 'smoke'"):
        read_reproduction(file, "smoke")


@pytest.mark.parametrize("scale", ["full", "smoke"])
def test_pictures_show_the_paper_at_full_scale_only(file, tmp_path, scale):
    reproduction = read_reproduction(file, scale, ["engine.device=cpu"])
    shown = grid(reproduction, carry_out(reproduction, tmp_path))
    labels = [
        label
        for axis in shown.figures["table.png"].axes
        for label in axis.get_legend_handles_labels()[1]
    ]
    assert ("paper" in labels) == (scale == "full") and "ours, standard" in labels
    assert "90.5 ± 0.5" in shown.table.markdown()


def test_what_is_missing_is_said_and_the_rest_runs(file, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDENSEMBLE_DATA", str(tmp_path / "empty"))
    text = TABLE.replace('"data.separation" = 0.5', '"data.source" = "mnist", "model.hidden" = [2]')
    text = text.replace(
        'label = "two"\n', 'label = "two"\nset = { "algorithm.name" = "not-there" }\n', 1
    )
    file.write_text(text)
    (tmp_path / "base.toml").write_text(BASE.replace("n = 60\nn_test = 30\n", ""))
    file.write_text(file.read_text().replace('set = { "data.separation" = 8.0 }\n', ""))
    checked = without_missing(
        read_reproduction(file, "full", ["engine.device=cpu"]), tmp_path / "runs"
    )
    assert [bool(cell.skipped) for cell in checked.cells] == [False, True, True]
    assert "not-there" in checked.cells[1].skipped
    assert "fedensemble data get mnist" in checked.cells[2].skipped
    results = carry_out(checked, tmp_path / "runs")
    assert [result.runs is None for result in results] == [False, True, True]
    write_reproduction(tmp_path / "out", checked, results, tmp_path / "runs", 1.0, [])
    page = (tmp_path / "out" / "table.md").read_text()
    assert "the data are not here" in page
    assert str(tmp_path / "empty") not in page


def test_a_cell_that_diverges_does_not_keep_the_others(file, tmp_path):
    text = TABLE.replace('label = "two"\n', 'label = "two"\nset = { "algorithm.lr" = 1e30 }\n', 1)
    file.write_text(text)
    reproduction = read_reproduction(file, "full", ["engine.device=cpu"])
    results = carry_out(reproduction, tmp_path / "runs", ["easy"])
    assert [result.runs is None for result in results] == [False, True, True]
    assert list(results[1].failed) == [0, 1] and not results[2].failed
    assert results[1].failed[0].startswith("loss became")
    write_reproduction(tmp_path / "out", reproduction, results, tmp_path / "runs", 1.0, [])
    page = (tmp_path / "out" / "table.md").read_text()
    assert "Without numbers (diverged: seed 0: loss became" in page and "): easy / two." in page
    assert "Without numbers (not run yet): hard / one." in page
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(told["cells"][1]["diverged"]) == ["0", "1"]
    # the reason is kept where it is not tried again
    later = carry_out(reproduction, tmp_path / "runs", ["hard"])
    assert later[1].failed == results[1].failed


def test_collect_replaces_what_stands_between_the_marks(file, tmp_path):
    whole = read_reproduction(file, "smoke", ["engine.device=cpu"])
    results = carry_out(whole, tmp_path / "runs")
    write_reproduction(tmp_path / "out" / "mine", whole, results, tmp_path / "runs", 1.0, ["x"])
    page = tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    page.write_text("# Results\n\nBy hand.\n")
    assert collect(tmp_path / "out", page) == ["mine"]
    once = page.read_text()
    assert once.startswith("# Results\n\nBy hand.\n")
    assert "](images/mine-table.png)" in once
    assert (tmp_path / "docs" / "images" / "mine-table.png").is_file()
    collect(tmp_path / "out", page)
    assert page.read_text() == once
    with pytest.raises(InputError, match="no tables"):
        collect(tmp_path / "empty", page)


def table(folder: Path, name: str, number: int, title: str = "", scale: str = "") -> str:
    """Writes a table as `reproduce` does, and returns its section of a page."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    text = (
        f"## {title or name.capitalize()}\n\n| a |\n| --- |\n| {number} |\n\n"
        f"`fedensemble reproduce {name}{scale}`\n"
    )
    (folder / name / "table.md").write_text(text)
    (folder / name / "results.json").write_text('{"sittings": []}')
    return f"{text}\nThe runs are those of other tables.\n"


def test_collect_leaves_other_tables_as_they_are(tmp_path):
    page, by_hand = tmp_path / "page.md", "## By hand\n\nMine.\n"
    names = ["table1", "table4", "figure-toy", "a-search"]
    first = [table(tmp_path / "all", name, 1) for name in names]
    assert collect(tmp_path / "all", page) == names
    assert page.read_text() == "\n".join([f"# Results\n\n{BEGIN}\n", *first, f"{END}\n"])
    page.write_text(page.read_text().replace(END, f"{by_hand}\n{END}") + "After.\n")
    new = [table(tmp_path / "some", name, 2) for name in ("table3", "table4", "b-search")]
    collect(tmp_path / "some", page)
    parts = [first[0], *new[:2], *first[2:], by_hand, new[2]]
    assert page.read_text() == "\n".join([f"# Results\n\n{BEGIN}\n", *parts, f"{END}\nAfter.\n"])


def test_collect_mixes_neither_scales_nor_titles(tmp_path):
    page = tmp_path / "page.md"
    table(tmp_path / "smoke", "table1", 1, scale=" --scale smoke")
    table(tmp_path / "full", "table1", 2)
    collect(tmp_path / "smoke", page)  # it has none of another scale
    before = page.read_text()
    with pytest.raises(InputError, match=r"tables of scale smoke.*another page"):
        collect(tmp_path / "full", page)
    table(tmp_path / "smoke", "mine", 3, title="Table1", scale=" --scale smoke")
    with pytest.raises(InputError, match="have the same title"):
        collect(tmp_path / "smoke", page)
    assert page.read_text() == before


def test_the_limit_is_the_prior_of_what_the_data_leave_open():
    trained_on = np.array([[1.0, 0, 0], [1.0, 1.0, 0]])  # they decide the first two weights
    at = np.array([[3.0, 4.0, 0.5], [0.0, 0.0, 1.5]])
    assert limit_variance(at, trained_on, scale=2.0) == pytest.approx(4 * (0.25 + 2.25) / 2)


def test_the_papers_numbers_can_be_read():
    for path in papers_folder().glob("*.toml"):
        for given in read_reproduction(path, "full", ["engine.device=cpu"]).table.paper.values():
            for text in given.values():
                mean, spread = paper_number(text)
                assert 0 < mean < 100
                assert 0 <= spread <= 2
