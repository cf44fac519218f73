"""ONNX Runtime and torch.export agree with `Ensemble.predict` for all kinds of models.

One model per family; FEDENSEMBLE_EXPORT_ALL=1 runs all that are registered.
"""

import os
import sys

import numpy as np
import pytest
import torch
from torch import nn

from fedensemble.data.normalize import Standardise
from fedensemble.export import onnx_model, torch_program
from fedensemble.export.example_inputs import to_file_inputs
from fedensemble.federation.named_models import build_model
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.models.registry import models
from fedensemble.predict import Ensemble
from fedensemble.testing.toy_problems import numbers
from fedensemble.uncertainty import Calibration, CalibrationSettings

onnxruntime = pytest.importorskip("onnxruntime")

IMAGE = (3, 32, 32)
# Small variants of the registered models: options, and the shape of an input.
VARIANTS: dict[str, tuple[dict, tuple[int, ...]]] = {
    "cnn": ({}, (1, 28, 28)),
    "cnn-pfl": ({}, IMAGE),
    "gpt": ({"width": 8, "depth": 2}, (6,)),
    "lstm": ({"hidden": 8}, (6,)),
    "mlp": ({"hidden": [8], "dropout": 0.5}, (1, 8, 8)),
    "mobilenet": ({"width": 0.25}, (3, 16, 16)),
    "rbf": ({}, (1,)),
    "resnet18": ({"width": 4}, (3, 16, 16)),
    "resnet20": ({"width": 4}, (3, 16, 16)),
    "shufflenet": ({"width": 0.5}, (3, 16, 16)),
    "vit": ({"width": 8, "depth": 2}, IMAGE),
    "wide": ({"width": 16}, (4,)),
}
ALL = bool(os.environ.get("FEDENSEMBLE_EXPORT_ALL"))
IN_CI = ["mlp", "rbf", "lstm", "cnn"]
BATCHES = (1, 7, 1024)


def ensemble(model, shape, *, loss="cross_entropy", modes=2, samples=1, tokens=False, **options):
    """Untrained modes with running statistics that matter."""
    targets = torch.zeros(1) if loss == "mse" else torch.zeros(1, dtype=torch.int64)
    functional = FunctionalModel(model, loss, targets, dtype=options.pop("dtype", torch.float32))
    theta, buffers = functional.init_params(0, modes * samples)
    if functional.has_batch_statistics:
        buffers = buffers + 0.3 * numbers(*buffers.shape).abs().to(buffers)
    theta, buffers = (t.reshape(modes, samples, -1) for t in (theta, buffers))
    options = {"input_shape": shape, "tokens": tokens, **options}
    return Ensemble(
        functional,
        theta[:, 0],
        buffers[:, 0],
        predictors=theta,
        predictor_buffers=buffers,
        **options,
    )


def registered(name):
    options, shape = VARIANTS[name]
    model = build_model({"name": name, **options}, {"shape": shape, "outputs": 10})
    loss = "mse" if name == "rbf" else "cross_entropy"
    return ensemble(model, shape, loss=loss, tokens=name in ("lstm", "gpt"))


def inputs_for(made, rows):
    shape = (rows, *made.input_shape)
    if made.tokens:
        return torch.arange(rows * made.input_shape[0]).reshape(shape) % 10
    return numbers(*shape, word=rows).float()


def assert_agrees(made, run, batches=BATCHES, tolerance=1e-5):
    """The outputs of a file are those of `predict`, for all numbers of inputs."""
    for rows in batches:
        x = inputs_for(made, rows)
        outputs, prediction = run(x), made.predict(x)
        expected = {"mean", "members"} | (
            {"variance"}
            if made.model.task == "regression"
            else {"label", "entropy", "mutual_information"}
        )
        assert set(outputs) == expected
        for name, output in outputs.items():
            value = np.asarray(output)
            if name == "label":
                assert value.dtype == np.int64
                assert np.mean(value == prediction.label.numpy()) > 0.999  # ties may round
            else:
                torch.testing.assert_close(
                    torch.from_numpy(value),
                    getattr(prediction, name),
                    rtol=tolerance,
                    atol=tolerance,
                )


def run_onnx(path):
    """A function that runs the file with ONNX Runtime alone."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda x: dict(zip(names, session.run(None, {"x": x.numpy()}), strict=True))


def run_pt2(path):
    return torch_program.load(path.read_bytes())


def test_all_models_have_a_variant():
    assert set(VARIANTS) == {name for name in models if models.package(name) is None}


@pytest.mark.parametrize("name", VARIANTS if ALL else IN_CI)
def test_registered_models(name, tmp_path):
    made = registered(name)
    formats = ((".onnx", run_onnx), (".pt2", run_pt2))
    for suffix, load in formats if ALL or name == "mlp" else formats[:1]:
        path = tmp_path / f"model{suffix}"
        file = made.export(path)
        assert file.difference <= 1e-5 and file.models == 2 and file.bytes == path.stat().st_size
        assert_agrees(made, load(path))


class Odd(nn.Module):
    """Attention over the outputs of a GRU, with BatchNorm, dropout and a learned position."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.position = nn.Parameter(torch.randn(6, 8))
        self.norm = nn.BatchNorm1d(8)
        self.gru = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True)
        self.after = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        x = self.norm((self.embed(x) + self.position).transpose(1, 2)).transpose(1, 2)
        x, _ = self.gru(torch.relu_(x))
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.out(self.dropout(self.after(x + attended)).mean(1))


def test_an_odd_model(tmp_path):
    made = ensemble(Odd, (6, 5))
    for suffix, load in ((".onnx", run_onnx), (".pt2", run_pt2)):
        made.export(tmp_path / f"odd{suffix}")
        assert_agrees(made, load(tmp_path / f"odd{suffix}"))


def test_several_predictors_per_mode_and_logits(tmp_path):
    """As after `snapshots` or `swag`: K * S models; a mode is the mean over its own."""
    made = ensemble(lambda: nn.Linear(4, 3), (4,), modes=2, samples=3, combine="logits")
    file = made.export(tmp_path / "m.onnx")
    assert file.models == 6
    run = run_onnx(tmp_path / "m.onnx")
    assert_agrees(made, run)
    assert run(inputs_for(made, 5))["members"].shape == (6, 5, 3)


@pytest.mark.parametrize(
    ("place", "temperatures"), [("mean", (0.4,)), ("member", (0.4, 3.0)), (None, ())]
)
@pytest.mark.parametrize("combine", ["probabilities", "logits"])
def test_temperatures_of_a_calibration(place, temperatures, combine, tmp_path):
    made = ensemble(lambda: nn.Linear(4, 3), (4,), modes=2, samples=2, combine=combine)
    plain = made.predict(inputs_for(made, 5)).mean
    made.calibration = Calibration(
        CalibrationSettings(method="none"), 3, 2, 10, 1, place=place, temperatures=temperatures
    )
    made.export(tmp_path / "m.onnx")
    assert_agrees(made, run_onnx(tmp_path / "m.onnx"))
    assert torch.allclose(plain, made.predict(inputs_for(made, 5)).mean) == (place is None)


def test_float64_one_mode_and_one_output(tmp_path):
    made = ensemble(lambda: nn.Linear(4, 1), (4,), loss="bce", modes=1, dtype=torch.float64)
    made.export(tmp_path / "m.onnx")
    run = run_onnx(tmp_path / "m.onnx")
    assert_agrees(made, lambda x: run(x.double()), tolerance=1e-12)
    assert not run(inputs_for(made, 5).double())["mutual_information"].any()


def test_bytes_of_images_become_numbers(tmp_path):
    rule = Standardise((100.0, 80.0, 60.0), (50.0, 60.0, 70.0))

    def model():
        return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 2))

    made = ensemble(model, (3, 4, 4), standardise=rule)
    made.export(tmp_path / "m.onnx")
    images = (numbers(9, 3, 4, 4).abs() * 100).clamp(max=255).to(torch.uint8)
    outputs = run_onnx(tmp_path / "m.onnx")(to_file_inputs(made, images))
    torch.testing.assert_close(
        torch.from_numpy(outputs["mean"]), made.predict(images).mean, rtol=0, atol=1e-5
    )


def test_without_onnxruntime_the_difference_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    file = ensemble(lambda: nn.Linear(4, 3), (4,)).export(tmp_path / "m.onnx")
    assert file.difference is None and "not compared" in str(file)
    assert onnx_model.load(b"") is None
