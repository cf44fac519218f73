"""Files of calibrated ensembles: sets, intervals and answers are those of `Ensemble.predict`."""

import json

import onnx
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble import InputError
from fedensemble.export import onnx_model, torch_program
from fedensemble.testing.toy_problems import numbers

onnxruntime = pytest.importorskip("onnxruntime")


def classified(clients: int = 6, combine: str = "probabilities") -> fe.Federation:
    x = numbers(900, 4, word=1)
    y = (x[:, :3] + 0.7 * numbers(900, 3, word=2)).argmax(-1)
    data = fe.FederatedData.from_arrays(x, y, [900 // clients] * clients).with_calibration(0.4)
    federation = fe.Federation(
        lambda: nn.Linear(4, 3), data, fe.FedAvg(lr=0.5), modes=3, combine=combine
    )
    federation.train(4)
    return federation


def run_file(path, x):
    if path.suffix == ".pt2":
        return torch_program.load(path.read_bytes())(x)
    return onnx_model.load(path.read_bytes())(x)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize(
    ("method", "randomized", "scope", "client"),
    [
        ("lac", True, "mixture", None),
        ("lac", True, "class", None),
        ("aps", True, "client", 2),
        ("raps", False, "pool", None),
        ("raps", True, "mixture", None),
    ],
)
def test_sets(method, randomized, scope, client, suffix, tmp_path):
    federation = classified(combine="logits" if method == "lac" else "probabilities")
    federation.calibrate(method=method, randomized=randomized, scope=scope)
    path = tmp_path / f"m{suffix}"
    file = federation.ensemble.export(path, client=client, risk=0.3)
    assert file.outputs[-2:] == ("sets", "answered") and file.difference < 1e-5
    for rows in (1, 400):
        x = numbers(rows, 4, word=9).float()
        prediction, outputs = federation.predict(x, client=client), run_file(path, x)
        torch.testing.assert_close(outputs["mean"], prediction.mean, rtol=0, atol=1e-5)
        assert outputs["sets"].dtype == torch.bool and outputs["sets"].shape == (rows, 3)
        assert (outputs["sets"] == prediction.sets).double().mean() > 0.995  # scores may round
        answered = prediction.abstain(risk=0.3).answered
        assert (outputs["answered"] == answered).double().mean() > 0.995
        if rows > 1:
            assert 0.2 < outputs["answered"].double().mean() < 1
            assert outputs["sets"].any(0).all() and not outputs["sets"].all()


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize(("method", "outputs"), [("absolute", 1), ("cqr", 2)])
def test_intervals(method, outputs, suffix, tmp_path):
    x = numbers(400, 3, word=1)
    y = x[:, :1] + 0.3 * numbers(400, 1, word=2)
    data = fe.FederatedData.from_arrays(x, y, [100] * 4).with_calibration(0.5)

    def net() -> nn.Module:
        class Ends(nn.Module):  # quantiles in ascending order
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 1)

            def forward(self, x):
                return self.layer(x) + torch.tensor([[-0.1, 0.1]])[:, :outputs]

        return Ends()

    def loss(output, target):
        return (output - target).square().flatten(1).mean(1)

    federation = fe.Federation(
        net, data, fe.FedAvg(lr=0.1), modes=2, loss="mse" if outputs == 1 else loss
    )
    federation.train(4)
    federation.calibrate(method=method)
    path = tmp_path / f"m{suffix}"
    federation.ensemble.export(path)
    for rows in (1, 9):
        new = numbers(rows, 3, word=5).float()
        torch.testing.assert_close(
            run_file(path, new)["interval"], federation.predict(new).interval, rtol=0, atol=1e-5
        )


def test_the_file_says_what_was_calibrated(tmp_path):
    federation = classified()
    made = federation.calibrate(alpha=0.2, temperature="member")
    federation.ensemble.export(tmp_path / "m.onnx", risk=0.3)
    found = {p.key: p.value for p in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert json.loads(found["temperatures"]) == list(made.temperatures)
    assert json.loads(found["thresholds"]) == list(made.thresholds)
    assert float(found["alpha"]) == 0.2 and float(found["risk"]) == 0.3
    assert found["method"] == "lac" and found["temperature"] == "member"
    limit = federation.predict(numbers(5, 4).float()).abstain(risk=0.3).threshold
    assert float(found["most_entropy"]) == limit


def test_some_of_the_modes_have_no_calibration(tmp_path):
    federation = classified()
    federation.calibrate()
    assert federation.ensemble.select([0, 1, 2]).calibration is not None
    assert federation.ensemble.select([0, 2]).calibration is None
    file = federation.ensemble.export(tmp_path / "m.onnx", modes=[0, 2])
    assert "sets" not in file.outputs and "not calibrated" in str(file)
    with pytest.raises(InputError, match="a calibration of all modes is not valid for some"):
        federation.ensemble.export(tmp_path / "m.onnx", modes=[0, 2], risk=0.1)


def test_mistakes(tmp_path):
    federation = classified()
    path = tmp_path / "m.pt2"
    with pytest.raises(InputError, match="risk needs a calibrated ensemble: call"):
        federation.ensemble.export(path, risk=0.1)
    with pytest.raises(InputError, match="calibrated for each client; this one was not"):
        federation.ensemble.export(path, client=0)
    federation.calibrate()
    with pytest.raises(InputError, match="risk to be above 0 and below 1; got risk=2"):
        federation.ensemble.export(path, risk=2)
    with pytest.raises(InputError, match="scope='client'"):
        federation.ensemble.export(path, client=0)
    assert not path.exists()
