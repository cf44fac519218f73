"""Labels that are text, from an .npz file to the report and the predictions of a run."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import fedensemble as fe

from .command_line import run

OWN = """
rounds = 4
[data]
source = "npz"
path = "mine.npz"
partition = "iid"
clients = 3
[algorithm]
lr = 0.5
optimizer = "adam"
[model]
name = "mlp"
[ensemble]
modes = 2
clients_per_round = 3
strata = 3
[training]
epochs = 5
loss = "{loss}"
"""


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    y = np.where(x[:, 0] > 0, "sick", "<healthy>")
    arrays = {"x": x, "y": y, "x_test": x, "y_test": y}
    np.savez(tmp_path / "mine.npz", **arrays)
    return arrays


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_names_reach_report_predictions_and_files(
    tmp_path: Path, arrays: dict[str, np.ndarray], loss: str
) -> None:
    (tmp_path / "own.toml").write_text(OWN.format(loss=loss))
    code, _, errors = run(
        "run", "own.toml", "--set", "algorithm.lr=0.05", "--out", "a", cwd=tmp_path
    )
    assert code == 0, errors
    summary = json.loads((tmp_path / "a" / "predictions.json").read_text())
    assert summary["task"] == "classification" and summary["labels"] == ["<healthy>", "sick"]
    assert json.loads((tmp_path / "a" / "clients.json").read_text())["labels"] == summary["labels"]
    assert run("report", "a", cwd=tmp_path)[0] == 0
    page = (tmp_path / "a" / "report.html").read_text()
    assert "sick" in page and "&lt;healthy&gt;" in page and "<healthy>" not in page

    np.savez(tmp_path / "in.npz", x=arrays["x"])
    for name in ("out.npz", "out.csv"):
        code, _, errors = run("predict", "a", "in.npz", "-o", name, cwd=tmp_path)
        assert code == 0, errors
    with np.load(tmp_path / "out.npz") as out, (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
        assert out["mean"].shape == (60, 2) and out["class_names"].tolist() == summary["labels"]
        assert [row["label_name"] for row in rows] == out["label_name"].tolist()
        assert [int(row["label"]) for row in rows] == out["label"].tolist()
        expected = [f"{p:.6g}" for p in out["mean"][:, 1].tolist()]
        assert [row["p(sick)"] for row in rows] == expected
        assert np.mean(out["label_name"] == arrays["y"]) > 0.9

    ensemble = fe.load_ensemble(tmp_path / "a")
    assert ensemble.class_names == ("<healthy>", "sick")
    metrics = fe.evaluate(ensemble.predict(arrays["x"]), arrays["y"])
    final = json.loads((tmp_path / "a" / "summary.json").read_text())["test"]
    assert metrics["accuracy"] == pytest.approx(final["accuracy"])


def test_labels_that_training_lacks_are_named(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    (tmp_path / "own.toml").write_text(OWN.format(loss="cross_entropy"))
    np.savez(tmp_path / "mine.npz", **{**arrays, "y_test": np.array(["dead"] * 60)})
    code, _, errors = run("run", "own.toml", "--out", "a", cwd=tmp_path)
    assert code == 2 and "test data of mine.npz" in errors and "'dead'" in errors, errors
    names = 'data.class_names=["<healthy>", "dead", "sick"]'
    code, _, errors = run("run", "own.toml", "--set", names, "--out", "b", cwd=tmp_path)
    assert code == 0, errors


def test_a_csv_has_no_place_for_members(tmp_path: Path) -> None:
    code, _, errors = run("predict", "a", "in.npz", "-o", "out.csv", "--members", cwd=tmp_path)
    assert code == 2 and "--members needs an .npz file" in errors
