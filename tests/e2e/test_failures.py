"""A run that diverges, or that could not be compared, costs nothing but itself."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from .command_line import run
from .test_cli import SMALL

ROWS = """
base = "small.toml"
seeds = [0, 1]
[[row]]
label = "FedProx"
set = { "algorithm.name" = "fedprox", "algorithm.mu" = 1e30 }
[[row]]
label = "FedAvg"
[[row]]
label = "Fed-ensemble"
set = { "ensemble.modes" = 2 }
"""
TABLE = """
name = "mine"
title = "Mine"
base = "small.toml"
seeds = [0]
[[row]]
label = "easy"
[[column]]
label = "one"
[[column]]
label = "two"
set = { "ensemble.modes" = 2 }
[scale.full]
[scale.smoke]
"""
DIVERGING = ["--set", "algorithm.lr=1e30"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL.format(rounds=3))
    (tmp_path / "rows.toml").write_text(ROWS)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "small.toml").write_text(SMALL.format(rounds=3))
    (tmp_path / "own" / "mine.toml").write_text(TABLE)
    return tmp_path


def test_a_row_that_diverges_leaves_the_others_their_table(folder: Path) -> None:
    code, output, errors = run("compare", "rows.toml", cwd=folder)
    assert code == 1
    assert "FedProx, seed 0: loss became" in output and "FedProx, seed 1: loss became" in output
    assert (
        errors.strip()
        == "error: These runs diverged and have no results: FedProx, seed 0; FedProx, seed 1."
    )
    (made,) = (folder / "runs" / "compare").glob("compare-*")
    assert {path.name for path in made.iterdir()} == {
        "report.md",
        "table.csv",
        "table.tex",
        "clients.csv",
        "runs.csv",
        "references.bib",
        "curves.png",
        "curves.pdf",
        "curves.svg",
        "runs.json",
        "report.html",
    }
    header, prox, average, ensemble = csv.reader((made / "table.csv").read_text().splitlines())
    assert prox[1] == "0" and set(prox[2:]) == {""} and len(prox) == len(header)
    assert header[1:3] == ["seeds", "accuracy_mean"]
    assert float(average[2]) > 0 and float(ensemble[2]) > 0
    assert re.search(r"\| FedProx \|( – \|)+$", output, re.MULTILINE)
    assert [len(runs) for runs in json.loads((made / "runs.json").read_text()).values()] == [
        0,
        2,
        2,
    ]
    assert "- FedProx, seed 1: loss became" in (made / "report.md").read_text()
    assert "seed 1: loss became" in (made / "report.html").read_text()
    assert "not found" not in (made / "report.html").read_text()


def test_rows_that_all_diverge(folder: Path) -> None:
    code, output, errors = run(
        "compare", "small.toml", "--modes", "1,2", "--seeds", "4", *DIVERGING, cwd=folder
    )
    assert code == 1 and "K = 2, seed 4: loss became" in output
    assert "K = 1, seed 4; K = 2, seed 4." in errors


@pytest.mark.parametrize("file", ["own/mine.toml", "figure-toy"])
def test_a_table_whose_cells_all_diverge(folder: Path, file: str) -> None:
    code, _, errors = run(
        "reproduce", file, "--scale", "smoke", "--device", "cpu", *DIVERGING, cwd=folder
    )
    assert code == 1 and "diverged and have no results:" in errors
    tables = list((folder / "reproduced" / "smoke").glob("*/table.md"))
    if file == "own/mine.toml":
        assert "Without numbers (diverged: seed 0: loss became" in tables[0].read_text()
        assert "not run yet" not in tables[0].read_text()


def test_a_table_says_what_made_it(folder: Path) -> None:
    plain, changed = (
        ["reproduce", "own/mine.toml", "--device", "cpu"],
        ["--set", "rounds=2", "--seeds", "1,2"],
    )
    assert run(*plain, "--runs", "r", cwd=folder)[0] == 0
    first = folder / "reproduced" / "full" / "mine" / "table.md"
    before = first.read_bytes()
    assert before.decode().splitlines()[-1] == "`fedensemble reproduce own/mine.toml`"
    assert run(*plain, *changed, "--only", "one", cwd=folder)[0] == 0
    assert first.read_bytes() == before
    (other,) = (path for path in (folder / "reproduced" / "full").glob("mine-*"))
    assert len(other.name) == len("mine-") + 8
    made = (other / "table.md").read_text().splitlines()
    assert made[0] == "## Mine, with --set rounds=2 --seeds 1,2"
    assert made[-1] == "`fedensemble reproduce own/mine.toml --set rounds=2 --seeds 1,2`"
    assert run(*plain, *changed, "--scale", "smoke", cwd=folder)[0] == 0
    small = (folder / "reproduced" / "smoke" / other.name / "table.md").read_text()
    assert (
        small.splitlines()[-1]
        == "`fedensemble reproduce own/mine.toml --scale smoke --set rounds=2 --seeds 1,2`"
    )


def test_a_page_of_another_scale_is_refused_before_training(folder: Path) -> None:
    command = ["reproduce", "own/mine.toml", "--device", "cpu", "--collect", "page.md"]
    assert run(*command, cwd=folder)[0] == 0
    before = (folder / "page.md").read_bytes()
    code, output, errors = run(*command, "--scale", "smoke", "--set", "rounds=2", cwd=folder)
    assert code == 2 and "page.md has tables of scale full" in errors and "another page" in errors
    assert "round" not in output and (folder / "page.md").read_bytes() == before


def test_what_cannot_be_compared_is_said_before_training(folder: Path) -> None:
    (folder / "rows.toml").write_text(f'metric = "acuracy"\n{ROWS}')
    code, output, errors = run("compare", "rows.toml", cwd=folder)
    assert code == 2 and "unknown metric 'acuracy': did you mean 'accuracy'" in errors
    np.savez(folder / "own.npz", x=np.zeros((40, 3), np.float32), y=np.arange(40) % 2)
    (folder / "own.toml").write_text("rounds=2\n[data]\nsource='npz'\npath='own.npz'\nclients=4")
    code, output, errors = run("compare", "own.toml", "--modes", "1,2", cwd=folder)
    assert code == 2 and "no test set" in errors
    assert "round" not in output and not (folder / "runs").exists()
