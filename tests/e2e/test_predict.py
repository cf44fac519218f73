"""A finished run predicts, on the command line and in Python, and says what is wrong with its
inputs.
"""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

import fedensemble as fe
from fedensemble import InputError
from fedensemble.cli.commands.predict import AbstentionRule, to_arrays, to_csv
from fedensemble.experiment.storage.run_folder import RunFolder

from .command_line import run

FEATURES = 8  # of the small config's data


def test_predict_checks_its_input(folder: Path) -> None:
    assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 0
    (folder / "no.npz").write_text("not a zip")
    np.savez(folder / "shape.npz", x=np.zeros((2, 99), np.float32))
    np.savez(
        folder / "nan.npz",
        inputs=np.stack([np.zeros(FEATURES, np.float32), np.full(FEATURES, np.nan)]),
    )
    np.savez(folder / "names.npz", a=np.zeros(2), b=np.zeros(2))
    np.savez(folder / "pickle.npz", x=np.array([object()]))
    for name, message in (
        ("missing.npz", "There is no file"),
        ("no.npz", "it is not an .npz file"),
        ("small.toml", "it is not an .npz file"),
        ("nan.npz", "(first in row 1)"),
        ("shape.npz", "trained on"),
        ("names.npz", "needs an array named x"),
        ("pickle.npz", "would have to be unpickled"),
    ):
        code, _, errors = run("predict", "a", name, "-o", "out.npz", cwd=folder)
        assert code == 2 and message in errors, errors
        assert not (folder / "out.npz").exists()
    code, _, errors = run("predict", "nowhere", "shape.npz", "-o", "out.npz", cwd=folder)
    assert code == 2 and "is not a run" in errors
    np.savez(folder / "one.npz", inputs=np.zeros((2, FEATURES), np.float32))
    code, _, errors = run("predict", "a", "one.npz", "-o", "nowhere/out.npz", cwd=folder)
    assert (
        code == 2 and "There is no folder nowhere" in errors and not (folder / "nowhere").exists()
    )
    # the only array needs no name
    assert run("predict", "a", "one.npz", "-o", "out.npz", cwd=folder)[0] == 0


def test_predict_takes_whole_numbers_for_a_model_of_numbers(folder: Path) -> None:
    assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 0
    for kind in (np.int64, np.float32):
        np.savez(folder / "in.npz", x=np.arange(2 * FEATURES).reshape(2, FEATURES).astype(kind))
        code, _, errors = run("predict", "a", "in.npz", "-o", f"{kind.__name__}.npz", cwd=folder)
        assert code == 0, errors
    with np.load(folder / "int64.npz") as whole, np.load(folder / "float32.npz") as floats:
        np.testing.assert_array_equal(whole["mean"], floats["mean"])


def test_a_finished_run_is_served_in_python(folder: Path) -> None:
    with pytest.raises(InputError, match="is not a run: there is no such folder"):
        fe.load_ensemble(folder / "a")
    RunFolder(folder / "b").path.mkdir()
    (folder / "b" / "config.toml").write_text(run("show", "small.toml", cwd=folder)[1])
    with pytest.raises(InputError, match="is not finished"):
        fe.load_ensemble(folder / "b")
    # digits are standardized
    settings = ["--set", "data.source=digits", "--set", "ensemble.combine=logits"]
    code, _, errors = run("run", "small.toml", *settings, "--out", "a", cwd=folder)
    assert code == 0, errors
    x = np.random.default_rng(0).integers(0, 17, size=(5, 1, 8, 8)).astype(np.uint8)
    np.savez(folder / "in.npz", x=x)
    assert run("predict", "a", "in.npz", "-o", "out.npz", "--device", "cpu", cwd=folder)[0] == 0
    ensemble = fe.load_ensemble(str(folder / "a"))
    assert ensemble.standardise is not None and ensemble.combine == "logits" and len(ensemble) == 3
    np.testing.assert_array_equal(
        ensemble.predict(x).mean.numpy(), np.load(folder / "out.npz")["mean"]
    )
    with pytest.raises(InputError, match="trained on"):
        ensemble.predict(x[:, 0])
    (folder / "a" / "modes.safetensors").write_bytes(b"gone")
    with pytest.raises(fe.StoreError, match="start the run's command again"):
        fe.load_ensemble(folder / "a")


def test_predict_writes_uncertainty(folder: Path) -> None:
    assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 0
    from fedensemble.data import load

    x = load("gaussians", n=400, classes=4).x_test
    np.savez(folder / "in.npz", x=np.asarray(x))
    code, _, errors = run("predict", "a", "in.npz", "-o", "out.npz", "--members", cwd=folder)
    assert code == 0, errors
    with np.load(folder / "out.npz") as out:
        assert set(out.files) == {
            "mean",
            "label",
            "entropy",
            "mutual_information",
            "members",
            "mode_index",
        }
        assert out["mode_index"].tolist() == [0, 1, 2]
        assert out["members"].shape == (3, len(x), 4)
        np.testing.assert_allclose(out["mean"], out["members"].mean(0), atol=1e-6)
        np.testing.assert_array_equal(out["label"], out["mean"].argmax(1))
        assert (out["mutual_information"] >= 0).all() and (
            out["entropy"] >= out["mutual_information"] - 1e-6
        ).all()


def test_predictions_go_to_npz_or_csv(folder: Path) -> None:
    code, _, errors = run("predict", "a", "in.npz", "-o", "p.txt", cwd=folder)
    assert code == 2 and "as .npz or .csv; got 'p.txt'" in errors


def test_unsure_rows_are_left_unanswered(folder: Path) -> None:
    assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 0
    from fedensemble.data import load

    x = np.asarray(load("gaussians", n=400, classes=4).x_test)
    np.savez(folder / "in.npz", x=x)
    predict = ("predict", "a", "in.npz", "--device", "cpu", "-o")
    code, text, errors = run(*predict, "out.csv", "--coverage", "0.75", cwd=folder)
    assert code == 0, errors
    with (folder / "out.csv").open() as opened:
        rows = list(csv.DictReader(opened))
    assert list(rows[0])[:5] == ["label", "answered", "reason", "entropy", "mutual_information"]
    prediction = fe.load_ensemble(folder / "a").predict(x)
    expected = prediction.abstain(coverage=0.75)
    assert expected.coverage == 0.75
    assert f"{len(x) * 3 // 4} of {len(x)} answered, those with entropy" in " ".join(text.split())
    for row, label, known in zip(
        rows, prediction.label.tolist(), expected.answered.tolist(), strict=True
    ):
        assert row["answered"] == ("yes" if known else "no")
        assert row["label"] == (str(label) if known else "")
        reason = f"entropy {float(row['entropy']):.6g} > {expected.threshold:.6g}"
        assert row["reason"] == ("" if known else reason)
    limit = float((1 - prediction.mean.amax(1)).median())
    options = ("--abstain-above", str(limit), "--score", "max_probability")
    assert run(*predict, "out.npz", *options, cwd=folder)[0] == 0
    with np.load(folder / "out.npz") as out:
        sure = 1 - out["mean"].max(1) <= limit
        np.testing.assert_array_equal(out["answered"], sure)
        np.testing.assert_array_equal(out["label"], np.where(sure, out["mean"].argmax(1), -1))
        np.testing.assert_allclose(out["uncertainty"], 1 - out["mean"].max(1), atol=1e-6)
        assert out["threshold"] == limit and out["score"] == "max_probability"
        assert 0 < sure.sum() < len(x)


def test_bad_abstention_is_one_sentence(folder: Path) -> None:
    assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 0
    np.savez(folder / "in.npz", x=np.zeros((2, FEATURES), np.float32))
    for options, message in (
        (("--coverage", "0"), "coverage to be above 0 and at most 1; got coverage=0.0"),
        (("--coverage", "1.5"), "got coverage=1.5"),
        (("--abstain-above", "nan"), "threshold to be a number"),
        (("--abstain-above", "1", "--coverage", "0.5"), "give one"),
        (("--score", "entropy"), "--score needs --risk, --abstain-above or --coverage"),
        (("--coverage", "0.5", "--score", "entropi"), "did you mean 'entropy'?"),
    ):
        code, _, errors = run("predict", "a", "in.npz", "-o", "out.csv", *options, cwd=folder)
        assert code == 2 and message in " ".join(errors.split()), errors
        assert not (folder / "out.csv").exists() and "Traceback" not in errors


def test_names_of_unanswered_rows_are_empty() -> None:
    mean = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    prediction = fe.Prediction(mean, mean.unsqueeze(0), class_names=("cat", "dog"))
    abstention = prediction.abstain(coverage=0.5)
    table = list(csv.DictReader(to_csv(prediction, abstention).splitlines()))
    assert [row["label_name"] for row in table] == ["cat", ""]
    arrays = to_arrays(prediction, abstention)
    assert arrays["label_name"].tolist() == ["cat", ""] and arrays["label"].tolist() == [0, -1]
    values = fe.Prediction(mean, mean.unsqueeze(0), "regression", "outputs")
    with pytest.raises(InputError, match="'entropy' needs class probabilities"):
        AbstentionRule(coverage=0.5).apply(values)
