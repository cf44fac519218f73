"""The pages for users say what is so: examples run, commands parse, links lead somewhere, names are
complete.
"""

import doctest
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from torch import nn

import fedensemble as fe
from fedensemble.cli.main import app
from fedensemble.config.schema import Config
from fedensemble.core.algorithm import algorithms
from fedensemble.testing import check_algorithm

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PYTHON_PAGE = ROOT / "docs" / "ref-python.md"


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)


def test_examples_of_the_python_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(
        r"^```(console|pycon)\n(.*?)^```$", text(PYTHON_PAGE), re.DOTALL | re.MULTILINE
    )
    said: list[str] = []
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner()
    for language, source in examples:  # in the order of the page: they use each other's folders
        if language == "console":
            for line in source.splitlines():
                command = shlex.split(line.removeprefix("$ fedensemble "), comments=True)
                subprocess.run(
                    [sys.executable, "-m", "fedensemble", *command], check=True, capture_output=True
                )
            continue
        test = doctest.DocTestParser().get_doctest(
            source, names, PYTHON_PAGE.name, str(PYTHON_PAGE), 0
        )
        runner.run(test, out=said.append, clear_globs=False)
        names = test.globs
    assert runner.tries > 30 and not runner.failures, "".join(said)


def test_the_python_page_names_everything_public():
    named = set(re.findall(r"`(\w+)`", text(PYTHON_PAGE)))
    assert not sorted(set(fe.__all__) - named)


def test_the_readme_trains_in_twelve_lines_and_the_command_line_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it saves
    readme = ROOT / "README.md"
    example, names = blocks(readme, "python")[0], {}
    assert len([line for line in example.splitlines() if line]) == 12
    exec(example, names)
    assert names["federation"].round == 50 and len(names["reports"]) == 40
    line = next(line for line in example.splitlines() if "evaluate()" in line)
    for metric in line.split("# a dict: ")[1].removesuffix(", ...").split(", "):
        assert metric in names["metrics"]
    assert (tmp_path / "run1" / "report.html").exists()
    np.savez("inputs.npz", x=names["data"].x_test.numpy())
    (tmp_path / "run1" / "report.html").unlink()
    tutorial = ROOT / "docs" / "tutorial-first-run.md"
    console = next(block for block in blocks(tutorial, "console") if "run run1" in block)
    for command in console.splitlines():
        words = shlex.split(command.removeprefix("$ fedensemble "))
        subprocess.run([sys.executable, "-m", "fedensemble", *words], check=True)
    predicted = len((tmp_path / "predictions.csv").read_text().splitlines()) - 1
    assert predicted == len(names["data"].x_test)
    assert (tmp_path / "run1" / "report.html").exists()
    # 40 rounds in Python and 20 on the command line are, to the bit, 50 and 10 in Python.
    names["federation"].train(10)
    loaded = fe.Federation.load("run1")
    assert loaded.round == 60
    assert torch.equal(loaded.ensemble.theta, names["federation"].ensemble.theta)


@pytest.mark.parametrize("page", ["index.md", "ref-python.md", "tutorial-first-run.md"])
def test_other_pages_have_the_same_twelve_lines(page):
    example = blocks(ROOT / "README.md", "python")[0]
    assert example in blocks(ROOT / "docs" / page, "python")


def test_the_readme_trains_a_model_and_data_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"`(fe\.Federation\(MyNet, [^`]+\))`", text(ROOT / "README.md"))
    x = torch.randn(20, 6, 4, generator=torch.Generator().manual_seed(0))
    (x0, y0), (x1, y1), *others = zip(x, (x.sum(-1) > 0).long(), strict=True)
    names = {"fe": fe, "MyNet": lambda: nn.Linear(4, 2), "others": others}
    names |= {"x0": x0, "y0": y0, "x1": x1, "y1": y1}
    federation = eval(example.replace("(x1, y1), ...]", "(x1, y1), *others]"), names)
    assert len(federation.data) == 20
    federation.train(3)
    federation.save("run")
    loaded = fe.load_ensemble("run", model=names["MyNet"])  # without the data
    assert torch.equal(loaded.predict(x0).mean, federation.predict(x0).mean)


def test_the_method_of_the_readme_keeps_the_contract(monkeypatch):
    # it is there for this test alone
    monkeypatch.setattr(algorithms, "_items", {name: algorithms[name] for name in algorithms})
    names = {"fe": fe, "dataclass": dataclass, "__name__": "readme"}
    exec(blocks(ROOT / "README.md", "python")[-1], names)
    check_algorithm(names["Leash"]())


def commands() -> list[str]:
    lines = [
        line
        for page in PAGES
        for block in blocks(page, "(?:console|bash)")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    parts = [
        part.strip()
        for line in lines
        for part in line.removeprefix("$ ").split("  #")[0].split(";")
    ]
    return sorted({part.split(" > ")[0] for part in parts if part.startswith("fedensemble ")})


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command):
    parser = typer.main.get_command(app)
    words = shlex.split(command, comments=True)[1:]
    context = None
    while hasattr(parser, "commands"):
        parser, context = (
            parser.commands[words[0]],
            parser.make_context("fedensemble", words[:1], parent=context),
        )
        words = words[1:]
    # raises for what it does not know, and runs nothing
    parser.make_context(parser.name, words, parent=context)


def test_commands_are_found():
    assert len(commands()) > 20 and "fedensemble deploy my.toml --out app" in commands()


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in map(slug, re.findall(r"^#+ (.+)$", text(target), re.MULTILINE)), link


def test_settings_are_all_in_the_reference():
    _, *sections = re.split(
        r"^\| \*\*`\[(\w+)\]`\*\*", text(ROOT / "docs" / "ref-config.md"), flags=re.MULTILINE
    )
    rows = dict(zip(sections[::2], sections[1::2], strict=True))
    for name, field in Config.model_fields.items():
        # tables of plug-ins are in ref-options.md
        known = getattr(field.annotation, "model_fields", ())
        first = {
            word
            for row in rows.get(name, "").splitlines()
            for word in re.findall(r"`([\w.]+)`", row)
        }
        assert set(known) <= first, name


def test_where_is_names_files_and_functions_that_exist():
    """Each backquoted path of the page exists, and its file defines the names after a colon."""
    package, page = ROOT / "src" / "fedensemble", (ROOT / "docs" / "where-is.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 20
    for row in rows:
        folder, source = package, ""
        for name in re.findall(r"`([^`]+)`", row):
            if name.endswith((".py", "/")):
                path = package / name if (package / name).exists() else folder / name
                assert path.exists(), name
                folder, source = (path, "") if path.is_dir() else (path.parent, path.read_text())
            else:
                assert re.search(rf"\b(def|class) {name}\b", source), (row, name)
