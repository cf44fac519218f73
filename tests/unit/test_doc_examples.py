"""Examples of the developers' pages run: shapes, a layer, an engine."""

import doctest
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedensemble as fe
from fedensemble.cli.main import app
from fedensemble.config.schema import resolve
from fedensemble.core.average import averages
from fedensemble.core.engine import engines
from fedensemble.core.schedule import schedules
from fedensemble.engines.stacked.handlers import HANDLERS
from fedensemble.testing import check_average, check_engine

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("performance.md", 3),
        ("shapes.md", 20),
        ("explanation-theory.md", 8),
        ("how-to-scikit-learn.md", 30),
        ("how-to-data.md", 8),
        ("how-to-distill.md", 12),
        ("how-to-bring-your-own.md", 15),
    ],
)
def test_examples(page, least, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks(page, "pycon")), {}, page, page, 0)
    output: list[str] = []
    result = doctest.DocTestRunner().run(test, out=output.append)
    assert result.attempted > least and not result.failed, "".join(output)


def test_the_layer():
    handler, example = blocks("how-to-add-a-layer.md", "python")
    names: dict[str, object] = {"__name__": "layer"}
    with patch.dict(HANDLERS):
        exec(handler, names)
        exec(example, names)
        names["test_bilinear"]()


def test_the_layer_needs_its_handler():
    _, example = blocks("how-to-add-a-layer.md", "python")
    names: dict[str, object] = {"__name__": "layer"}
    exec(example, names)
    with pytest.raises(AssertionError, match="not run by the handler"):
        names["test_bilinear"]()


def test_the_engine():
    engine, check = blocks("how-to-add-an-engine.md", "python")
    assert 'check_engine("vmap")' in check
    assert "vector" in engines  # the built-in engines are imported now, not inside the patch
    with patch.dict(engines._items):
        exec(engine, {"__name__": "vmap_engine"})
        check_engine("vmap")


def two_hard_of_six() -> fe.FederatedData:
    """Six clients; labels of the last two are random, so that their losses stay high."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(6, 20, 4, generator=rng)
    y = (x.sum(-1) > 0).long()
    y[4:] = torch.randint(2, (2, 20), generator=rng)
    return fe.FederatedData.from_clients(list(zip(x, y, strict=True)))


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def test_the_schedule_that_depends_on_losses(tmp_path, capsys):
    source, use = [
        text for text in blocks("how-to-bring-your-own.md", "python") if "HighLoss" in text
    ]
    names: dict = {"__name__": "high_loss", "MyNet": linear, "data": two_hard_of_six()}
    with patch.dict(schedules._items):
        exec(source, names)
        exec(use, names)  # checks the contract, and trains
        assert "tensor([" in capsys.readouterr().out
        federation = names["federation"]
        # the plans of a resumed federation are those of an uninterrupted one
        federation.save(tmp_path)
        again = fe.Federation.load(tmp_path, model=linear, data=names["data"])
    assert torch.equal(again.state.schedule["loss"], federation.state.schedule["loss"])
    plans = [[report.plan for report in each.rounds(60)] for each in (federation, again)]
    for one, other in zip(*plans, strict=True):
        assert torch.equal(one.client, other.client) and torch.equal(one.mode, other.mode)
    visits = torch.bincount(torch.cat([plan.client for plan in plans[0]]), minlength=6)
    assert visits[4:].min() > visits[:4].max()


def test_the_plan_of_such_a_schedule_is_not_prefetched():
    source = next(t for t in blocks("how-to-bring-your-own.md", "python") if "class HighLoss" in t)
    names: dict = {"__name__": "high_loss"}
    with patch.dict(schedules._items):
        exec(source, names)
    called = []
    sizes = {"modes": 2, "strata": 1, "clients_per_round": 2}
    for schedule in (fe.Stratified(**sizes), names["HighLoss"](**sizes)):
        federation = fe.Federation(linear, two_hard_of_six(), "fedavg", schedule=schedule)
        with patch.object(federation.engine, "prefetch") as prefetch:
            federation.prefetch_round()
        called.append(prefetch.called)
    assert called == [True, False]


def test_the_page_on_averages():
    page = "how-to-average.md"
    test = doctest.DocTestParser().get_doctest("\n".join(blocks(page, "pycon")), {}, page, page, 0)
    output: list[str] = []
    result = doctest.DocTestRunner().run(test, out=output.append)
    assert result.attempted >= 8 and not result.failed, "".join(output)
    rule = next(text for text in blocks(page, "python") if "class LastTwo" in text)
    with patch.dict(averages._items):
        exec(rule, names := {"__name__": "last_two"})
        check_average(names["LastTwo"]())
        assert averages["last-two"] is names["LastTwo"]
    for text in blocks(page, "toml"):
        resolve({**tomllib.loads(text), "data": {"source": "digits", "clients": 10}})


@pytest.mark.parametrize(
    ("page", "least"), [("how-to-uncertainty.md", 30), ("how-to-calibrate.md", 25)]
)
def test_the_pages_on_uncertainty(page, least):
    test = doctest.DocTestParser().get_doctest("\n".join(blocks(page, "pycon")), {}, page, page, 0)
    output: list[str] = []
    result = doctest.DocTestRunner().run(test, out=output.append)
    assert result.attempted >= least and not result.failed, "".join(output)


def test_the_tutorial_on_asking_a_human(tmp_path, monkeypatch):
    """Its files, commands, checks and the output that it shows, in their order."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    page = "tutorial-ask-a-human.md"
    make, triage = blocks(page, "python")
    Path("make_patients.py").write_text(make)
    Path("patients.toml").write_text(blocks(page, "toml")[0])
    Path("triage.py").write_text(triage)
    text = (DOCS / page).read_text(encoding="utf-8")
    commands = [line[2:].split() for line in text.splitlines() if line.startswith("$ ")]
    assert len(commands) == 8
    for program, *words in commands:
        if program == "fedensemble":
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, (words, result.output, result.exception)
            continue
        run = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        shown = text.partition(f"$ python {' '.join(words)}\n")[2].splitlines()[0]
        assert run.stdout.strip() == ("" if shown == "```" else shown)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks(page, "pycon")), {}, page, page, 0)
    output: list[str] = []
    result = doctest.DocTestRunner().run(test, out=output.append)
    assert result.attempted >= 10 and not result.failed, "".join(output)
