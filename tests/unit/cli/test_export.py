"""`fedensemble export` writes a file, or says in a sentence why not."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedensemble as fe
from fedensemble.cli.main import app
from fedensemble.data import load, partition
from fedensemble.export import torch_program
from fedensemble.testing.toy_problems import classification


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved run of two modes."""
    path = tmp_path_factory.mktemp("export") / "run"
    model = {"name": "mlp", "hidden": [4]}
    federation = fe.Federation(model, classification(), modes=2, clients_per_round=4)
    federation.train(2)
    federation.save(path)
    return path


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A saved run of three modes whose clients keep rows for calibration."""
    data = partition(load("digits"), "dirichlet", clients=10, seed=0, alpha=1.0)
    data = data.with_calibration(0.1, seed=0)
    federation = fe.Federation("mlp", data, modes=3, clients_per_round=6)
    federation.train(3)
    path = tmp_path_factory.mktemp("export") / "digits"
    federation.save(path)
    return path, federation


def call(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)])


def test_a_run_is_exported(folder, tmp_path):
    result = call(folder, "-o", tmp_path / "m.pt2")
    assert result.exit_code == 0, result.output
    assert "2 models written to" in result.output and "at most" in result.output
    x = classification().x[:5]
    outputs = torch_program.load((tmp_path / "m.pt2").read_bytes())(x.float())
    expected = fe.load_ensemble(folder).predict(x)
    torch.testing.assert_close(outputs["mean"], expected.mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("run", "output", "says"),
    [
        ("run", "m.pt", "as .onnx or .pt2"),
        ("run", "missing/m.pt2", "no folder"),
        ("nowhere", "m.pt2", "is not a run"),
    ],
)
def test_mistakes(run, output, says, folder, tmp_path):
    result = call(folder.parent / run, "-o", tmp_path / output)
    assert isinstance(result.exception, fe.FedEnsembleError) and says in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_the_best_modes_by_the_rows_for_calibration(digits, tmp_path):
    folder, federation = digits
    result = call(folder, "-o", tmp_path / "m.pt2", "--modes", "best:2")
    assert result.exit_code == 0, result.output
    held = federation.data.calibration
    ranking = federation.ensemble.rank_modes(held.x, held.y)
    lines = [line for line in result.output.splitlines() if line.startswith("| ")][2:]
    assert [int(line.split("|")[2]) for line in lines] == list(ranking.order)
    assert f"on {len(held)} rows" in result.output and "2 models written" in result.output


def test_the_best_modes_by_a_file(folder, digits, tmp_path):
    _, federation = digits
    x, y = federation.data.x_test[:50], federation.data.y_test[:50]
    np.savez(tmp_path / "rows.npz", x=x.numpy(), y=y.numpy())
    options = ("--modes", "best:1", "--rows", tmp_path / "rows.npz")
    result = call(digits[0], "-o", tmp_path / "m.pt2", *options)
    assert result.exit_code == 0 and "on 50 rows" in result.output, result.output


def test_test_rows_choose_nothing(folder, tmp_path):
    result = call(folder, "-o", tmp_path / "m.pt2", "--modes", "best:1")
    assert "test rows are not used for choices" in str(result.exception)
    result = call(folder, "-o", tmp_path / "m.pt2", "--modes", "0", "--rows", "rows.npz")
    assert "--modes best:3 with it" in str(result.exception)
