"""Tests of finished runs on shifted inputs: their images, their metrics, and continuing."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor

import fedensemble as fe
from fedensemble.config.schema import resolve
from fedensemble.data.corruptions import ABSENT, CORRUPTIONS, SEVERITIES, corrupt
from fedensemble.errors import DataError, InputError
from fedensemble.experiment.run import run
from fedensemble.experiment.storage.removal import select_runs
from fedensemble.experiment.studies import shift_test
from fedensemble.experiment.studies.shift_test import (
    FILE,
    ShiftTable,
    ShiftTest,
    label_metrics,
    parts_of,
    read_shift,
)
from fedensemble.experiment.studies.shifted_inputs import other_images, reshape_images

NOISE = {"source": "stand-in-images", "channels": 3, "side": 40, "seed": 5, "n_test": 30}
TABLE = ShiftTable(ood={"other": NOISE}, ood_images=25, corrupted_images=6)
VALUES = {
    "rounds": 3,
    "data": {
        "source": "stand-in-images", "channels": 1, "side": 28, "n": 80, "n_test": 30, "clients": 4,
        "seed": 0,
    },
    "model": {"name": "mlp", "hidden": [8], "dropout": 0.2},
    "ensemble": {"modes": 2, "clients_per_round": 2, "dropout_samples": 3},
    "average": {"name": "ema", "decay": 0.5},
    "engine": {"device": "cpu"},
}  # fmt: skip


@pytest.fixture
def finished(tmp_path):
    config = resolve(VALUES)
    run(config, tmp_path / "run")
    return config, tmp_path / "run"


def gray(images: np.ndarray) -> np.ndarray:
    weights = np.array([0.299, 0.587, 0.114]).reshape(1, 3, 1, 1)
    return np.rint((images * weights).sum(1, keepdims=True)).astype(np.uint8)


def test_reshaped_images():
    rng = np.random.default_rng(0)
    color = rng.integers(0, 256, (4, 3, 6, 6), dtype=np.uint8)
    own = torch.from_numpy(color)
    assert torch.equal(reshape_images(own, (3, 6, 6)), own)
    # Rounding of a sum that ends in .5 may differ between float32 and float64.
    difference = reshape_images(own, (1, 6, 6)).int() - torch.from_numpy(gray(color)).int()
    assert int(difference.abs().max()) <= 1 and float(difference.abs().float().mean()) < 0.05
    repeated = reshape_images(own[:, :1], (3, 6, 6))
    assert all(torch.equal(repeated[:, c], own[:, 0]) for c in range(3))
    # Halving the size: a triangle of four pixels to each side of every second edge.
    halved = reshape_images(own[:, :1], (1, 3, 3))[:, 0].double()
    weights = np.zeros((3, 6))
    for target in range(3):
        for pixel in range(6):
            weights[target, pixel] = max(0, 1 - abs(pixel - (2 * target + 0.5)) / 2)
    weights /= weights.sum(1, keepdims=True)
    expected = weights @ color[:, 0].astype(float) @ weights.T
    np.testing.assert_allclose(halved, expected, atol=0.51)
    with pytest.raises(InputError, match="1 or 3 channels"):
        reshape_images(own[:, :2], (3, 6, 6))


def test_only_images_in_bytes_have_other_shapes():
    with pytest.raises(InputError, match=r"Only images in bytes.*'gaussians'"):
        other_images("gaussians", {"n": 20, "n_test": 20}, (1, 28, 28), 5)
    with pytest.raises(InputError, match="Only images in bytes"):
        other_images("stand-in-images", {}, (80,), 5)
    with pytest.raises(DataError, match="no test set"):
        other_images("stand-in-images", {"n_test": 0}, (1, 28, 28), 5)


@pytest.mark.parametrize("way", ["test", "test_last"])
def test_metrics_are_those_of_the_public_functions(finished, way):
    config, folder = finished
    said: list[str] = []
    ShiftTest(said.append).test("mine", config, folder, TABLE, way)
    found = read_shift(folder, TABLE, way)
    federation = fe.Federation.load(folder)
    ensemble = federation.ensemble if way == "test" else federation.last_ensemble
    x, y = federation.data.x_test, federation.data.y_test
    others = other_images(
        "stand-in-images", {k: NOISE[k] for k in NOISE if k != "source"}, x.shape[1:], 25
    )
    expected = fe.ood_metrics(ensemble.predict(x[:25]), ensemble.predict(others))
    for score, metrics in expected.items():
        assert found["ood"]["other"][score] == pytest.approx(metrics, rel=1e-5)
    by_name = found["corruptions"]["metrics"]
    assert list(by_name) == list(CORRUPTIONS) and found["corruptions"]["absent"] == ABSENT
    for name in ("fog", "glass_blur"):
        levels = [
            corrupt(x[:6].numpy(), name, level, image_set="stand-in-images") for level in SEVERITIES
        ]
        # In one batch: dropout masks depend on the place of an image.
        mean = ensemble.predict(np.concatenate(levels)).mean.reshape(len(SEVERITIES), 6, -1)
        for level, own in zip(SEVERITIES, mean, strict=True):
            whole = fe.evaluate(fe.Prediction(own, own.unsqueeze(0)), y[:6])
            for metric in ("accuracy", "nll", "ece"):
                value = by_name[name][str(level)][metric]
                assert value == pytest.approx(whole[metric], rel=1e-5, abs=1e-7)
    assert any("6 models tested" in line for line in said)


def test_results_are_kept_and_only_what_is_missing_is_tested(finished, monkeypatch):
    config, folder = finished
    small = ShiftTable(ood={"other": NOISE}, ood_images=25)
    ShiftTest(lambda text: None).test("mine", config, folder, small, "test")
    before = json.loads((folder / FILE).read_text())
    assert len(before) == 1
    tested = []
    own = shift_test._Tested.ood
    monkeypatch.setattr(
        shift_test._Tested, "ood", lambda self, name: tested.append(name) or own(self, name)
    )
    ShiftTest(lambda text: None).test("mine", config, folder, TABLE, "test")
    after = json.loads((folder / FILE).read_text())
    assert not tested and len(after) == 2 and before.items() <= after.items()
    monkeypatch.setattr(shift_test, "_Tested", None)  # nothing is left to do
    ShiftTest(lambda text: None).test("mine", config, folder, TABLE, "test")
    # The file belongs to the run.
    assert select_runs([folder], folder.parent, False)


def test_each_set_of_inputs_has_a_key_of_its_own():
    tables = [
        TABLE,
        ShiftTable(ood={"other": NOISE}, ood_images=26, corrupted_images=7),
        ShiftTable(ood={"other": {**NOISE, "seed": 6}}, ood_images=25, corrupted_images=8),
    ]
    keys = [part.key for t in tables for way in ("test", "test_last") for part in parts_of(t, way)]
    assert len(set(keys)) == len(keys) == 12
    renamed = ShiftTable(ood={"another name": NOISE}, ood_images=25)
    assert parts_of(renamed, "test")[0].key == keys[0]


def test_missing_data_are_said_once_and_tested_later(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDENSEMBLE_DATA", str(tmp_path / "empty"))
    config, folder = finished
    table = ShiftTable(ood={"CIFAR10": {"source": "cifar10"}, "other": NOISE}, ood_images=25)
    said: list[str] = []
    test = ShiftTest(said.append)
    test.test("mine", config, folder, table, "test")
    test.test("mine", config, folder, table, "test_last")
    assert sum("Skipped: tests on CIFAR10" in line for line in said) == 1
    found = read_shift(folder, table, "test")
    assert list(found["ood"]) == ["other"] and found["corruptions"] == {}


def test_label_metrics_of_ties_and_certain_mistakes():
    mean = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])
    found = label_metrics(mean, torch.tensor([0, 1, 1]))
    expected = fe.evaluate(fe.Prediction(mean, mean.unsqueeze(0)), Tensor([0, 1, 1]).long())
    for metric, value in found.items():
        assert value == pytest.approx(expected[metric], rel=1e-5)
