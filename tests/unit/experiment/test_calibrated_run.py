"""Calibration in the folder of a run: by a config, by `fedensemble calibrate`, by Federation.save."""

import csv
import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedensemble as fe
from fedensemble.checkpoint_file import read_checkpoint, write_checkpoint
from fedensemble.cli.main import app
from fedensemble.data import load
from fedensemble.experiment.storage.checksums import changed_files
from fedensemble.experiment.storage.run_folder import RunFolder

CONFIG = """
name = "digits"
rounds = 6
data = { source = "digits", partition = "dirichlet", alpha = 0.3, clients = 10, calibration = 0.3 }
ensemble = { modes = 2, clients_per_round = 5 }
model = { name = "mlp", hidden = [8] }
algorithm = { name = "fedavg", lr = 0.3 }
"""


def call(*words, fails=None):
    result = CliRunner().invoke(app, list(map(str, words)))
    if fails is None:
        assert result.exit_code == 0, (result.output, result.exception)
    else:
        assert isinstance(result.exception, fe.FedEnsembleError), result.output
        assert fails in str(result.exception)
    return result.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run without calibration, and one with."""
    root = tmp_path_factory.mktemp("calibrate")
    (root / "plain.toml").write_text(CONFIG)
    (root / "table.toml").write_text(CONFIG + "[calibration]\nalpha = 0.2\nscope = 'client'\n")
    for name in ("plain", "table"):
        call("run", root / f"{name}.toml", "--out", root / name)
    np.savez(root / "x.npz", x=np.asarray(load("digits").x_test))
    return root


@pytest.fixture
def runs(trained, tmp_path):
    """Copies, because tests change them."""
    for name in ("plain", "table"):
        shutil.copytree(trained / name, tmp_path / name)
    shutil.copy(trained / "x.npz", tmp_path / "x.npz")
    return tmp_path


def test_a_table_calibrates_at_the_end_of_a_run(runs):
    summary, plain = (RunFolder(runs / name).summary() for name in ("table", "plain"))
    made, test = summary["calibration"], summary["calibration"]["test"]
    assert (made["alpha"], made["scope"], made["clients"]) == (0.2, "client", 10)
    assert summary["test"] == plain["test"]  # the curve is without calibration
    assert test["nll"] < summary["test"]["nll"] and "set_coverage" not in summary["test"]
    assert 0.7 < test["set_coverage"] < 0.95
    assert (
        made["test_clients"]["set_coverage_worst_10"] <= made["test_clients"]["set_coverage_mean"]
    )
    for way in ("bytes_up", "bytes_down"):  # in the ledger
        assert summary[way] == plain[way] + made[way] > plain[way]
    ensemble = fe.load_ensemble(runs / "table")
    assert ensemble.calibration.temperatures == tuple(made["temperatures"])
    predicted = ensemble.predict(load("digits").x_test)
    assert fe.evaluate(predicted, load("digits").y_test)["nll"] == pytest.approx(test["nll"])
    page = (runs / "table" / "report.html").read_text()
    assert "after calibration" in page and "coverage of sets" in page
    assert "| calibration |" not in (runs / "plain" / "report.md").read_text()
    assert "Calibration\n\n| what" in (runs / "table" / "report.md").read_text()


def test_the_command_does_what_the_table_does(runs):
    output = call("calibrate", runs / "plain", "--alpha", "0.2", "--scope", "client")
    assert "after calibration" in output and "coverage holds for" in output
    by_command, by_table = (RunFolder(runs / name).summary() for name in ("plain", "table"))
    assert by_command["calibration"] == by_table["calibration"]
    assert by_command["bytes_up"] == by_table["bytes_up"]
    one, other = (fe.load_ensemble(runs / name).calibration for name in ("plain", "table"))
    assert one.to_record() == other.to_record()
    predictions = [(runs / name / "predictions.json").read_bytes() for name in ("plain", "table")]
    assert predictions[0] == predictions[1]
    assert changed_files(runs / "plain") == []
    # Again, with other settings: the bytes are those of the last calibration.
    call("calibrate", runs / "plain", "--method", "none", "--abstain", "")
    again = RunFolder(runs / "plain").summary()
    assert again["bytes_up"] < by_command["bytes_up"]
    assert fe.load_ensemble(runs / "plain").calibration.thresholds == ()


def test_the_calibration_is_that_of_python(runs):
    federation = fe.Federation.load(runs / "plain")
    assert federation.calibration is None
    made = federation.calibrate(alpha=0.2, scope="client")
    loaded = fe.Federation.load(runs / "table")
    assert loaded.calibration.to_record() == made.to_record()
    assert fe.Federation.load(runs / "table", device="cpu").calibration is not None
    assert fe.Federation.load(runs / "table", average="ema").calibration is None
    loaded.train(1)
    assert loaded.calibration is None


def test_a_saved_federation_is_calibrated(runs, tmp_path):
    federation = fe.Federation.load(runs / "plain")
    made = federation.calibrate(alpha=0.2)
    folder = federation.save(tmp_path / "saved")
    assert fe.load_ensemble(folder).calibration.to_record() == made.to_record()
    assert fe.Federation.load(folder).calibration.to_record() == made.to_record()
    entry = RunFolder(folder).summary()["calibration"]
    assert entry["bytes_up"] == made.bytes_up and 0 < entry["test"]["set_coverage"] <= 1
    assert (folder / "predictions.json").exists()
    assert "after calibration" in fe.report(folder).read_text()


def test_evaluating_after_calibration_keeps_the_curve(runs):
    federation = fe.Federation.load(runs / "plain")
    federation.train(1)
    after = (federation.calibrate(alpha=0.2), federation.evaluate())[1]
    recorded = federation.history.records[-1]["test"]
    assert "set_coverage" in after and "set_coverage" not in recorded
    assert recorded == fe.evaluate(
        federation.uncalibrated.predict(federation.data.x_test), federation.data.y_test
    )


def test_predictions_apply_it(runs):
    call("predict", runs / "table", runs / "x.npz", "-o", runs / "p.csv", "--risk", "0.5")
    rows = list(csv.DictReader((runs / "p.csv").read_text().splitlines()))
    prediction = fe.load_ensemble(runs / "table").predict(load("digits").x_test)
    assert [row["set"] for row in rows] == ["|".join(names) for names in prediction.set_names]
    assert [int(row["set_size"]) for row in rows] == prediction.sets.sum(1).tolist()
    answered = prediction.abstain(risk=0.5).answered.tolist()
    assert [row["answered"] == "yes" for row in rows] == answered and any(answered)
    assert all(row["reason"] == "" or "entropy" in row["reason"] for row in rows)
    call("predict", runs / "table", runs / "x.npz", "-o", runs / "p.npz", "--client", "3")
    sets = np.load(runs / "p.npz")["sets"]
    own = fe.load_ensemble(runs / "table").predict(load("digits").x_test, client=3).sets
    assert (sets == own.numpy()).all() and (sets != prediction.sets.numpy()).any()


def test_rows_of_a_file(runs):
    data = load("digits")
    x, y = np.asarray(data.x_test), np.asarray(data.y_test)
    np.savez(runs / "rows.npz", x=x, y=y, client=np.array(["a", "b"])[np.arange(len(y)) % 2])
    call("calibrate", runs / "plain", "--rows", runs / "rows.npz", "--scope", "client")
    made = fe.load_ensemble(runs / "plain").calibration
    assert (made.rows, made.clients, made.client_names) == (len(y), 2, ("a", "b"))
    np.savez(runs / "rows.npz", x=x[:, :, :3], y=y)
    call("calibrate", runs / "plain", "--rows", runs / "rows.npz", fails="shape")
    np.savez(runs / "rows.npz", x=x, y=y + 9)
    call("calibrate", runs / "plain", "--rows", runs / "rows.npz", fails="labels go up to 18")


def test_a_run_without_rows(runs, tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG.replace(", calibration = 0.3", ""))
    call("run", tmp_path / "c.toml", "--out", tmp_path / "none", "--set", "rounds=1")
    call("calibrate", tmp_path / "none", fails="no rows to calibrate by")
    call("calibrate", tmp_path / "nowhere", fails="is not a run")
    call(
        "run",
        tmp_path / "c.toml",
        "--set",
        "calibration.alpha=0.1",
        fails="set data.calibration to",
    )


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("alpha", "1.5", "above 0 and below 1"),
        ("alpha", "nan", "above 0 and below 1"),
        ("method", "absolute", "is not for classification"),
        ("method", "lak", "lac"),
        ("alpha", "0.001", "needs 999 calibration rows"),
        ("abstain", "energy", "abstain"),
    ],
)
def test_bad_settings_of_the_command(runs, option, value, says):
    before = (runs / "plain" / "modes.safetensors").read_bytes()
    call("calibrate", runs / "plain", f"--{option}", value, fails=says)
    assert (runs / "plain" / "modes.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["calibration.alpha=1.5"], "above 0 and below 1"),
        (["calibration.alpha=0.001"], "needs 999 calibration rows"),
        (["calibration.method=absolute"], "is not for classification"),
        (["calibration.metod=lac"], "method"),
    ],
)
def test_bad_settings_of_a_config_train_nothing(tmp_path, settings, says):
    (tmp_path / "c.toml").write_text(CONFIG)
    words = [word for text in settings for word in ("--set", text)]
    call("run", tmp_path / "c.toml", "--out", tmp_path / "run", *words, fails=says)
    assert not (tmp_path / "run").exists()


def test_risk_needs_a_calibrated_run(runs):
    inputs, output = runs / "x.npz", runs / "p.csv"
    call("predict", runs / "plain", inputs, "-o", output, "--risk", "0.1", fails="calibrated run")
    call("predict", runs / "plain", inputs, "-o", output, "--client", "1", fails="--scope client")
    both = ("--risk", "0.1", "--coverage", "0.5")
    call("predict", runs / "table", inputs, "-o", output, *both, fails="--coverage and --risk")


@pytest.mark.parametrize(
    ("key", "value"),
    [("modes", 3), ("thresholds", [0.1, 0.2]), ("settings", {"alpha": 2.0}), ("rows", -1)],
)
def test_a_calibration_that_does_not_fit_is_rejected(runs, key, value):
    path = runs / "table" / "modes.safetensors"
    tensors, facts = read_checkpoint(path)
    facts["calibration"][key] = value
    write_checkpoint(path, tensors, facts)
    with pytest.raises(fe.FedEnsembleError, match="its calibration"):
        fe.load_ensemble(runs / "table")


def test_a_longer_run_is_calibrated_again(runs):
    before = fe.load_ensemble(runs / "table").calibration.to_record()
    call("run", runs / "table", "--set", "rounds=8")
    after = fe.load_ensemble(runs / "table").calibration
    assert after.to_record() != before and after.settings.alpha == 0.2
    call("calibrate", runs / "plain")
    call("run", runs / "plain", "--set", "rounds=8")  # without the table, it ends with training
    assert fe.load_ensemble(runs / "plain").calibration is None
    assert "calibration" not in RunFolder(runs / "plain").summary()


def test_a_change_of_the_calibration_leaves_the_modes(runs):
    before = read_checkpoint(runs / "plain" / "modes.safetensors")[0]
    environment = (runs / "plain" / "env.json").read_bytes()
    call("calibrate", runs / "plain")
    after = read_checkpoint(runs / "plain" / "modes.safetensors")[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (runs / "plain" / "env.json").read_bytes() == environment
