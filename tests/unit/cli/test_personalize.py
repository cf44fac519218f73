"""`fedensemble personalize`, the table `[personalize]` of a config, and predictions of a client."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedensemble.cli.main import app
from fedensemble.config.schema import check, resolve
from fedensemble.experiment.run import run
from fedensemble.experiment.storage.run_folder import RunFolder

CONFIG = {
    "rounds": 3,
    "data": {
        "source": "gaussians",
        "clients": 8,
        "calibration": 0.25,
        "new_clients": 0.25,
    },
    "model": {"name": "mlp", "hidden": [4]},
    "ensemble": {"modes": 2, "clients_per_round": 4},
    "engine": {"device": "cpu"},
    "personalize": {"methods": ["select", "tune", "head"], "head": ["layers.1.*"], "steps": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    run(resolve(CONFIG), path)
    return path


def command(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_records_personal_models_after_its_last_round(folder):
    records, summary = RunFolder(folder).metrics(), RunFolder(folder).summary()
    assert not any(key.startswith("test_select") for key in records[0])
    for name in ("select", "tune", "head"):
        assert records[-1][f"test_{name}"] == summary[f"test_{name}"]
        assert summary[f"test_{name}"]["clients"] == 6
        assert summary[f"test_{name}_new"]["clients"] == 2


def test_a_longer_run_has_the_records_of_one_that_was_not_extended(folder, tmp_path):
    longer = resolve({**CONFIG, "rounds": 4})
    run(longer, tmp_path / "whole")
    run(resolve(CONFIG), tmp_path / "extended")
    run(longer, tmp_path / "extended")
    first, second = (RunFolder(tmp_path / name).metrics() for name in ("whole", "extended"))
    for one, two in zip(first, second, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {
            k: v for k, v in two.items() if k != "seconds"
        }
    assert "test_select" not in second[2]


def test_the_command_saves_models_that_predict(folder, tmp_path):
    output = command("personalize", folder, "--method", "select,tune", "--steps", 2)
    assert "| all modes | in training |" in output
    assert "| tune | new |" in output
    summary = json.loads((folder / "summary.json").read_text())
    shown = f"{100 * summary['test_select']['accuracy_mean']:.2f}"
    assert f"| select | in training | {shown} |" in output
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 8), np.float32))
    output = command(
        "predict",
        folder,
        tmp_path / "x.npz",
        "-o",
        tmp_path / "out.npz",
        "--personal",
        "tune",
        "--client",
        1,
    )
    assert "3 predictions" in output
    assert np.load(tmp_path / "out.npz")["mean"].shape == (3, 4)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--personal", "mix", "--client", "1"), "no personal models of method 'mix'"),
        (("--personal", "select"), "needs its method and its client"),
    ],
)
def test_errors_of_predictions(folder, tmp_path, words, text):
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 8), np.float32))
    result = CliRunner().invoke(
        app,
        ["predict", str(folder), str(tmp_path / "x.npz"), "-o", str(tmp_path / "o.csv"), *words],
    )
    assert result.exit_code != 0
    assert text in " ".join((str(result.exception) + result.output).split())


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"methods": []}, "personalize.methods"),
        ({"methods": ["best"]}, "personalize.methods"),
        ({"methods": ["head"]}, "method 'head' needs head"),
        ({"methods": ["tune"], "optimizer": {"name": "sgdd"}}, "did you mean"),
        ({"methods": ["tune"], "rate": 1}, "personalize.rate"),
    ],
)
def test_problems_of_a_config(table, text):
    problems = check({**CONFIG, "personalize": table})[1]
    assert any(text in problem for problem in problems), problems


def test_a_config_needs_validation_rows():
    data = {key: value for key, value in CONFIG["data"].items() if key != "calibration"}
    problems = check({**CONFIG, "data": data})[1]
    assert "personalize: the clients have no validation rows" in problems[0]
