"""`fedensemble export` writes a file, or says in a sentence why not."""

import pytest
import torch
from typer.testing import CliRunner

import fedensemble as fe
from fedensemble.cli.main import app
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
