"""`fedensemble distill RUN`: a folder that predict, export and report take."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import fedensemble as fe
from fedensemble import InputError, StoreError
from fedensemble.cli.main import app
from fedensemble.data import load
from fedensemble.experiment import distilled_run
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.testing.toy_problems import classification

HALF_A_POINT = 0.005


def refuse(*words):
    """The message of a command that the user got wrong."""
    result = call(*words)
    assert isinstance(result.exception, fe.FedEnsembleError), result.output
    return str(result.exception)


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The default run, whose server keeps a tenth of the training rows without their labels."""
    folder = tmp_path_factory.mktemp("distill") / "digits"
    result = call("run", "--set", "data.server_share=0.1", "--out", folder)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def plain(digits):
    result = call("distill", digits)
    assert result.exit_code == 0, result.output
    return digits.with_name("digits-plain"), result.output


def test_the_distilled_model_is_as_good_as_the_ensemble(digits, plain):
    folder, output = plain
    facts = json.loads((folder / "distillation.json").read_text())
    ensemble, student = (facts[name]["test"]["accuracy"] for name in ("teacher", "student"))
    assert student >= ensemble - HALF_A_POINT
    assert ensemble == RunFolder(digits).summary()["test"]["accuracy"]
    assert facts["teacher"]["ood"]["entropy"]["auroc"] > 0.9
    assert facts["student"]["ood"]["entropy"]["auroc"] > 0.9
    for text in (output, (folder / "report.html").read_text(), (folder / "report.md").read_text()):
        assert "AUROC, ensemble" in text and "AUROC, distilled" in text
        assert f"{facts['student']['ood']['entropy']['auroc']:.3f}" in text


def test_a_dirichlet_student_keeps_mutual_information(digits):
    result = call("distill", digits, "--kind", "dirichlet", "--epochs", "60")
    assert result.exit_code == 0, result.output
    folder = digits.with_name("digits-dirichlet")
    facts = json.loads((folder / "distillation.json").read_text())
    assert facts["student"]["ood"]["mutual_information"]["auroc"] > 0.85
    assert facts["student"]["test"]["accuracy"] > 0.93
    loaded = fe.load_ensemble(folder)
    found = fe.evaluate(loaded.predict(load("digits").x_test), load("digits").y_test)
    assert found == facts["student"]["test"] and found["mutual_information"] > 0


def test_commands_take_the_folder(plain, tmp_path):
    folder, _ = plain
    np.savez(tmp_path / "x.npz", x=load("digits").x_test[:5])
    result = call("predict", folder, tmp_path / "x.npz", "-o", tmp_path / "p.npz")
    assert result.exit_code == 0, result.output
    result = call("export", folder, "-o", tmp_path / "m.pt2")
    assert "1 model written" in result.output
    result = call("report", folder)
    assert result.exit_code == 0 and "prediction models" in result.output
    listed = call("ls", "runs", "--runs", folder.parent).output
    assert "distilled" in listed


def test_it_is_not_trained_further(plain):
    folder, _ = plain
    for words in ((folder,), (folder, "--set", "rounds=600")):
        assert "cannot be trained for more rounds" in refuse("run", *words)
    with pytest.raises(StoreError, match="holds a distilled model"):
        fe.Federation.load(folder)
    assert "predicts with one model" in refuse("distill", folder)


def test_again_with_other_settings_inputs_and_architecture(digits, plain, tmp_path):
    images = load("digits").x[:60]
    np.savez(tmp_path / "x.npz", x=images)
    np.savez(tmp_path / "noise.npz", x=np.random.default_rng(0).integers(0, 17, (30, 1, 8, 8)))
    words = ("--inputs", tmp_path / "x.npz", "--ood", tmp_path / "noise.npz", "--epochs", 3)
    out = tmp_path / "small"
    for _ in range(2):  # a distilled model may be replaced
        result = call("distill", digits, "-o", out, *words, "--set", "model.hidden=[4]")
        assert result.exit_code == 0, result.output
    assert "30 unusual inputs" in result.output and "noise.npz" in result.output
    assert fe.load_ensemble(out).theta.shape == (1, 64 * 4 + 4 + 4 * 10 + 10)
    result = call("rm", "--yes", out)
    assert result.exit_code == 0 and not out.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--kind", "soft"), "plain, dirichlet"),
        (("--set", "rounds=3"), "only changes the model"),
        (("--set", "model.hiden=3"), "did you mean 'hidden'"),
        (("-o", "."), "holds other files"),
        (("--inputs", "nowhere.npz"), "no file nowhere.npz"),
        (("--lr", "-1"), "above 0"),
    ],
)
def test_mistakes(words, says, digits):
    assert says in refuse("distill", digits, *words)


def test_runs_without_unlabelled_inputs_say_what_to_do(tmp_path):
    federation = fe.Federation(
        {"name": "mlp", "hidden": [4]}, classification(), modes=2, clients_per_round=4
    )
    federation.train(2)
    folder = federation.save(tmp_path / "saved")
    assert "--inputs inputs.npz" in refuse("distill", folder)
    np.savez(tmp_path / "x.npz", x=classification().x_server)
    result = call("distill", folder, "--inputs", tmp_path / "x.npz", "--epochs", 2)
    assert result.exit_code == 0, result.output  # without a test set there are no metrics
    assert "There is no test set." in (tmp_path / "saved-plain" / "report.html").read_text()
    without = fe.FederatedData.from_clients([(np.eye(2), [0, 1])])
    with pytest.raises(InputError, match=r"data\.server_share"):
        distilled_run._inputs(folder, without)
