"""Methods that need more than means, from the command line: what they lack is said, what they make
can be used.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from fedensemble.data import load

from .command_line import run
from .test_cli import SMALL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL.format(rounds=2))
    return tmp_path


def settings(*values: str) -> list[str]:
    return [part for value in values for part in ("--set", value)]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["algorithm.name=fedbe"], "data.server_share"),
        (["algorithm.name=fedsdd"], "data.server_share"),
        (["algorithm.name=fedcross", "algorithm.alpha=1.5"], "FedCross needs alpha from 0 to 1"),
        (["algorithm.name=fedbe", "data.server_share=2"], "server_share"),
        (["algorithm.name=fedbe", "data.server_file=none.npz"], "none.npz"),
        (
            ["algorithm.name=fedbe", "data.server_share=0.1", "algorithm.distribution=uniform"],
            "algorithm.distribution",
        ),
        (["algorithm.name=pfnm", "algorithm.start=0"], "PFNM needs 0 < start <= 1"),
    ],
)
def test_bad_settings(folder, values, said):
    code, _, errors = run("run", "small.toml", *settings(*values), cwd=folder)
    assert code == 2, errors
    assert said in " ".join(errors.split())
    assert "Traceback" not in errors


def test_a_model_that_cannot_be_matched(folder):
    (folder / "images.toml").write_text(
        'data = { source = "digits", clients = 20 }\nmodel = { name = "resnet20" }\n'
    )
    code, _, errors = run("run", "images.toml", *settings("algorithm.name=fedma"), cwd=folder)
    assert code == 2
    assert "Algorithm 'fedma' cannot match layer" in errors
    assert "BatchNorm2d" in errors


@pytest.mark.parametrize("name", ["fedbe", "fedbe-nokd", "pfnm", "fedma", "fedcross", "fedsdd"])
def test_a_run_predicts_as_it_was_tested(folder, name):
    distils = name in ("fedbe", "fedsdd")
    extra = ["data.server_share=0.1", "algorithm.server_epochs=1"] if distils else []
    arguments = ["small.toml", *settings(f"algorithm.name={name}", *extra), "--out", "out"]
    code, _, errors = run("run", *arguments, cwd=folder)
    assert code == 0, errors
    source = load("gaussians", n=400, classes=4)
    np.savez(folder / "inputs.npz", x=source.x_test)
    code, _, errors = run("predict", "out", "inputs.npz", "-o", "said.npz", cwd=folder)
    assert code == 0, errors
    label = np.load(folder / "said.npz")["label"]
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert float((label == source.y_test).mean()) == pytest.approx(summary["test"]["accuracy"])
