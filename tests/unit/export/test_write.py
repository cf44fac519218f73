"""What an exported file says about itself, and models and arguments that cannot be exported."""

import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from tests.unit.export.test_models import ensemble
from torch import nn

import fedensemble as fe
from fedensemble import InputError
from fedensemble.export import write

onnx = pytest.importorskip("onnx")


def small(**options):
    return ensemble(lambda: nn.Linear(4, 3), (4,), **options)


NAMES = {"class_names": ["a", "b", "c"], "feature_names": ["w", "x", "y", "z"]}


def test_facts_are_in_both_files(tmp_path):
    made = small(samples=2, **NAMES)
    for name in ("m.onnx", "m.pt2"):
        made.export(tmp_path / name)
    proto = onnx.load(tmp_path / "m.onnx")
    stored = {entry.key: entry.value for entry in proto.metadata_props}
    texts = ("fedensemble_version", "task", "combine", "model", "input_dtype")
    in_onnx = {
        key: value if key in texts else json.loads(value)
        for key, value in stored.items()
        if not key.startswith("pkg.")
    }
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive:
        (extra,) = [name for name in archive.namelist() if name.endswith("fedensemble.json")]
        in_pt2 = json.loads(archive.read(extra))
    assert (
        in_onnx
        == in_pt2
        == {
            "fedensemble_version": fe.__version__,
            "task": "classification",
            "combine": "probabilities",
            "modes": 2,
            "mode_index": [0, 0, 1, 1],
            "model": "Linear",
            "input_shape": [4],
            "input_dtype": "float32",
            **NAMES,
        }
    )
    sizes = {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*proto.graph.input, *proto.graph.output)
    }
    assert sizes == {
        "x": ["batch", 4],
        "mean": ["batch", 3],
        "label": ["batch"],
        "entropy": ["batch"],
        "mutual_information": ["batch"],
        "members": [4, "batch", 3],
    }


ALONE = """
import sys
sys.modules["fedensemble"] = None
try:
    import fedensemble
except ImportError:
    pass
else:
    raise SystemExit("fedensemble can be imported")
import numpy as np
x = np.load("x.npy")
import onnxruntime
session = onnxruntime.InferenceSession("m.onnx")
mean, label = session.run(["mean", "label"], {"x": x})
assert "torch" not in sys.modules
import torch
program = torch.export.load("m.pt2").module()
with torch.no_grad():
    again = program(torch.from_numpy(x))
np.testing.assert_allclose(again["mean"].numpy(), mean, atol=1e-5)
np.savez("out.npz", mean=mean, label=label)
"""


def test_files_run_where_the_package_cannot_be_imported(tmp_path):
    made = small()
    for name in ("m.onnx", "m.pt2"):
        made.export(tmp_path / name)
    x = np.linspace(-1, 1, 36, dtype=np.float32).reshape(9, 4)
    np.save(tmp_path / "x.npy", x)
    subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, check=True)
    with np.load(tmp_path / "out.npz") as out:
        prediction = made.predict(x)
        np.testing.assert_allclose(out["mean"], prediction.mean.numpy(), atol=1e-5)
        assert (out["label"] == prediction.label.numpy()).all()


class Decides(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x[:, :3]


class Fixed(nn.Linear):
    def forward(self, x):
        return super().forward(x) if len(x) < 20 else x[:, :3]


class Calls(nn.Linear):
    """Leaves torch, as a model that calls another library does."""

    def forward(self, x):
        return torch.from_numpy(np.asarray(super().forward(x).detach().numpy()))


class Counts(nn.Linear):
    """Tracing takes len(x) for a constant; many models have it."""

    def forward(self, x):
        return super().forward(x.reshape(len(x), 4))


def test_the_number_of_inputs_by_len(tmp_path):
    made = ensemble(lambda: Counts(4, 3), (4,))
    assert made.export(tmp_path / "m.onnx").difference < 1e-5


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Decides, "Decides cannot be exported: its forward.* decides by the values.*torch.where"),
        (Fixed, "Fixed cannot be exported: its forward.* another number of inputs.*x.shape"),
        (Calls, "Calls cannot be exported: torch.export raises .*load_ensemble"),
    ],
)
def test_models_that_cannot_be_exported(model, says, tmp_path):
    made = ensemble(lambda: model(4, 3), (4,))
    for name in ("m.onnx", "m.pt2"):
        with pytest.raises(InputError, match=says):
            made.export(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_an_operation_that_onnx_lacks(tmp_path):
    class Digamma(nn.Linear):
        def forward(self, x):
            return torch.special.digamma(super().forward(x).abs() + 1)

    made = ensemble(lambda: Digamma(4, 3), (4,))
    with pytest.raises(InputError, match=r"Digamma cannot be translated to ONNX: .*\.pt2"):
        made.export(tmp_path / "m.onnx")
    assert made.export(tmp_path / "m.pt2").difference < 1e-5


def test_a_file_that_differs_is_not_written(tmp_path, monkeypatch):
    load = write.torch_program.load

    def load_wrong(content):
        run = load(content)
        return lambda x: {name: value + 1e-3 for name, value in run(x).items() if name != "label"}

    monkeypatch.setattr(write.torch_program, "load", load_wrong)
    with pytest.raises(InputError, match=r"differ from predict\(\) by 0.001.*not written"):
        small().export(tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())
    assert small().export(tmp_path / "m.pt2", tolerance=0.01).difference > 5e-4


@pytest.mark.parametrize(
    ("path", "options", "says"),
    [
        ("model.pth", {}, r"as .onnx or .pt2 .*model\.pth"),
        ("missing/model.onnx", {}, "no folder .*missing"),
        ("m.pt2", {"tolerance": 0}, "tolerance above 0; got 0"),
        ("m.pt2", {"examples": torch.zeros(0, 4)}, "at least one example"),
        ("m.pt2", {"examples": torch.zeros(2, 5)}, r"shape \(5,\) per example"),
    ],
)
def test_bad_arguments(path, options, says, tmp_path):
    with pytest.raises(InputError, match=says):
        small().export(tmp_path / path, **options)


def test_inputs_of_unknown_shape_need_examples(tmp_path):
    made = small(tokens=None)
    with pytest.raises(InputError, match="pass some inputs"):
        made.export(tmp_path / "m.pt2")
    made.export(tmp_path / "m.pt2", examples=torch.ones(2, 4))
    assert made.export(tmp_path / "m.pt2", examples=torch.ones(20, 4)).difference < 1e-5


def test_onnx_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(InputError, match=r"needs the package onnxscript: .*fedensemble\[export\]"):
        small().export(tmp_path / "m.onnx")
    small().export(tmp_path / "m.pt2")
