"""A run folder and a saved federation of an earlier version are still read, resumed and used.

`tests/data/earlier_version` was written by the version before modules were moved into packages.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedensemble as fe

from .command_line import run as call

OLD = Path(__file__).parents[1] / "data" / "earlier_version"


def copy_run(tmp_path):
    return Path(shutil.copytree(OLD / "run", tmp_path / "run"))


def test_a_finished_run_predicts_and_reports(tmp_path):
    run = copy_run(tmp_path)
    ensemble = fe.load_ensemble(run)
    assert len(ensemble) == 2
    x = np.zeros((3, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "inputs.npz", x=x)
    code, _, errors = call("predict", run, "inputs.npz", "-o", "out.npz", cwd=tmp_path)
    assert code == 0, errors
    with np.load(tmp_path / "out.npz") as predicted:
        np.testing.assert_allclose(predicted["mean"], ensemble.predict(x).mean, atol=1e-6)
    assert call("report", run, cwd=tmp_path)[0] == 0
    assert (run / "report.html").exists()


def test_an_unfinished_run_is_resumed_to_the_same_modes(tmp_path):
    run = copy_run(tmp_path)
    expected = load_file(run / "modes.safetensors")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("summary.json", "modes.safetensors", "checkpoint/round-00000004.safetensors"):
        (run / name).unlink()
    code, _, errors = call("run", run / "config.toml", "--out", run, cwd=tmp_path)
    assert code == 0, errors
    modes = load_file(run / "modes.safetensors")
    assert modes.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(modes[name], tensor, rtol=0, atol=1e-10)
    again = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in again] == [1, 2, 3, 4]
    assert again[:3] == records[:3]


def test_a_run_loads_as_a_federation_and_is_continued_in_python(tmp_path):
    run = copy_run(tmp_path)
    federation = fe.Federation.load(run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert federation.round == 4 and federation.history.records == records
    x = federation.data.x_test[:5]
    torch.testing.assert_close(federation.predict(x).mean, fe.load_ensemble(run).predict(x).mean)
    federation.train(1)
    federation.save(run)
    assert fe.Federation.load(run).round == 5 and len(fe.load_ensemble(run)) == 2


def test_a_saved_federation_is_saved_again_as_a_run_folder(tmp_path):
    clients = [(torch.zeros(6, 4), torch.arange(6) % 3) for _ in range(6)]
    data, net = fe.FederatedData.from_clients(clients), lambda: nn.Sequential(nn.Linear(4, 3))
    folder = shutil.copytree(OLD / "federation", tmp_path / "federation")
    with pytest.raises(fe.InputError, match=r"earlier version.*save it again"):
        fe.load_ensemble(folder, model=net)
    federation = fe.Federation.load(folder, model=net, data=data)
    federation.save(folder)
    assert not (folder / "federation.safetensors").exists()
    expected = federation.predict(torch.ones(2, 4)).mean
    again = fe.load_ensemble(folder, model=net).predict(torch.ones(2, 4)).mean
    assert torch.equal(again, expected)


def test_a_saved_federation_continues(tmp_path):
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(6, 4, generator=generator), torch.arange(6) % 3) for _ in range(6)]
    data = fe.FederatedData.from_clients(clients)
    folder = shutil.copytree(OLD / "federation", tmp_path / "federation")
    federation = fe.Federation.load(folder, model=lambda: nn.Sequential(nn.Linear(4, 3)), data=data)
    assert federation.round == 3
    expected = json.loads((folder / "after_six_rounds.json").read_text())["theta"]
    list(federation.rounds(3))
    theta = federation.state.modes["theta"]
    torch.testing.assert_close(theta, torch.tensor(expected, dtype=theta.dtype), rtol=0, atol=1e-10)
