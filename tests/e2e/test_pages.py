"""Pages for users that are programs, too: the method, a comparison from nothing, the file of a
trace.
"""

import csv
import doctest
import os
import pickle
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest

from fedensemble.participation.device_speeds import read_trace

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_examples_of_the_method_page() -> None:
    page = "explanation-method.md"
    test = doctest.DocTestParser().get_doctest("\n".join(blocks(page, "pycon")), {}, page, page, 0)
    said: list[str] = []
    found = doctest.DocTestRunner().run(test, out=said.append)
    assert found.attempted > 20 and not found.failed, "".join(said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page on comparisons, the package as `pip install -e` leaves it, and the
    data.
    """
    folder = tmp_path_factory.mktemp("mine")
    python, toml = blocks("how-to-compare.md", "python"), blocks("how-to-compare.md", "toml")
    names = (
        "my_models.py",
        "make_data.py",
        "pyproject.toml",
        "base.toml",
        "mine.toml",
        "grid.toml",
    )
    for name, text in zip(names, [*python, *toml], strict=True):
        (folder / name).write_text(text.replace("rounds = 100", "rounds = 4"))
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["py-modules"] == ["my_models"]
    installed = folder / "my_models-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-models\nVersion: 0.1\n")
    ((group, points),) = project["project"]["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines) + "\n")
    subprocess.run([sys.executable, "make_data.py"], cwd=folder, check=True)
    return folder


def said(command: str, folder: Path) -> str:
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    words = [sys.executable, "-m", "fedensemble", *shlex.split(command)[1:]]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr


def answered() -> list[tuple[str, str]]:
    """The commands of the page, and what it prints below each."""
    parts = [
        part for block in blocks("how-to-compare.md", "console") for part in block.split("$ ")[1:]
    ]
    lines = [part.partition("\n") for part in parts if part.startswith("fedensemble ")]
    return [(line.split("  #")[0], answer.strip()) for line, _, answer in lines]


@pytest.mark.parametrize(("command", "answer"), [pair for pair in answered() if pair[1]])
def test_commands_say_what_the_page_says(command: str, answer: str, folder: Path) -> None:
    assert answer in said(command, folder)


def test_the_comparison_of_the_page(folder: Path) -> None:
    assert "fedensemble compare mine.toml" in [command for command, _ in answered()]
    (printed,) = (
        block for block in blocks("how-to-compare.md", "") if block.startswith("Test set")
    )
    out = said("fedensemble compare mine.toml --seeds 0,1", folder)

    def first_cells(text: str) -> list[str]:
        return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]

    assert first_cells(out) == first_cells(printed) and len(first_cells(out)) == 6
    (shown, columns) = (
        next(line for line in text.splitlines() if line.startswith("| method")).split(" | ")
        for text in (printed, out)
    )
    # four rounds have one test, so there is no mean over several
    assert columns == [name for name in shown if "mean of last" not in name]
    report = re.findall(r"Report: (.+)/report.html", out)[0]
    page = (DOCS / "how-to-compare.md").read_text()
    section = page.partition("## Files for a paper")[2].partition("\n## ")[0]
    listed = [row for row in section.splitlines() if row.startswith("| `")]
    named = {name for row in listed for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert {file.name for file in (folder / report).iterdir()} == named
    # the mean over the runs of a method is the number in the table
    runs = list(csv.DictReader((folder / report / "runs.csv").read_text().splitlines()))
    assert len(runs) == 8 and {"method", "seed", "accuracy", "nll", "ensemble.modes"} <= set(
        runs[0]
    )
    accuracies = [float(run["accuracy"]) for run in runs if run["method"] == "FedAvg"]
    assert f"| FedAvg | {100 * sum(accuracies) / 2:.2f} ± " in out


def test_one_option_for_one_of_two_algorithms(folder: Path) -> None:
    (command,) = (c for c, _ in answered() if "algorithm.name=fedprox" in c)
    assert "| fedprox |" in said(f"{command} --seeds 0 --runs other", folder)
    algorithms = [
        tomllib.loads(file.read_text())["algorithm"]
        for file in (folder / "other").rglob("config.toml")
    ]
    assert {each["name"]: each.get("mu") for each in algorithms} == {"fedavg": None, "fedprox": 1.0}


def test_the_sweeps_of_the_page(folder: Path) -> None:
    swept = (c for c, _ in answered() if re.search(r"--set \S+,", c) and "--algo" not in c)
    sweep, lists = swept
    out = said(f"{sweep} --set rounds=1", folder)
    for lr, epochs in product(("0.05", "0.1"), ("1", "5")):
        assert f"| lr = {lr}, epochs = {epochs} |" in out
    out = said(f"{lists} --set rounds=1", folder)
    assert "| hidden = [16] |" in out and "| hidden = [16,16] |" in out


def test_the_grid_of_the_page(folder: Path) -> None:
    compare, reproduce = (c for c, _ in answered() if "grid.toml" in c)
    out = said(f"{compare} --seeds 0 --set rounds=1", folder)
    for row, column in product(("FedAvg", "Fed-ensemble"), ("1 epoch", "5 epochs")):
        assert f"| {row}, {column} |" in out
    out = said(f"{reproduce} --seeds 0 --set rounds=1", folder)
    assert re.search(r"^\|\s+\| evaluation \| 1 epoch \| 5 epochs \|$", out, re.MULTILINE), out
    assert "| FedAvg | standard |" in out and "| Fed-ensemble | standard |" in out


def test_what_the_page_cites(folder: Path) -> None:
    out = said("fedensemble cite mine.toml", folder)
    assert re.findall(r"^@\w+\{(.+),$", out, re.MULTILINE) == [
        "shi2021",
        "fedensemble",
        "mcmahan2017",
        "li2020",
    ]


def test_the_file_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("how-to-stragglers.md", "csv")
    Path("example.csv").write_text(example)
    devices = {
        1: {"computation": 153, "communication": 2209.616},
        2: {"computation": 39, "communication": 18437.312},
    }
    Path("client_device_capacity").write_bytes(pickle.dumps(devices))
    exec(blocks("how-to-stragglers.md", "python")[1], {})
    assert read_trace("device_capacity.csv").tolist() == [[153, 2209.616], [39, 18437.312]]
    assert Path("device_capacity.csv").read_text().split() == example.split()
