"""Python and the command line share run folders: each reads, continues and reports the other's."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble.data import load, partition
from fedensemble.models import models

from .command_line import run as call


class Net(nn.Module):
    """A model that no registry knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [B, 10]."""
        return self.layers(x)


OPTIONS = {"modes": 2, "clients_per_round": 6, "seed": 3}


@pytest.fixture(scope="module")
def digits() -> fe.FederatedData:
    return partition(load("digits"), "dirichlet", clients=20, seed=0, alpha=0.3)


def registered(digits: fe.FederatedData, **options: object) -> fe.Federation:
    model = {"name": "mlp", "hidden": [16]}
    return fe.Federation(model, digits, fe.FedAvg(lr=0.2), **{**OPTIONS, **options})


def same(a: fe.Federation, b: fe.Federation) -> bool:
    """Whether two federations are equal to the bit."""
    tensors, others = a.tensors(), b.tensors()
    return tensors.keys() == others.keys() and all(
        torch.equal(tensors[name], others[name]) for name in tensors
    )


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_command_line_continues_what_python_began_and_the_other_way_round(digits, tmp_path):
    whole = registered(digits)
    whole.train(9, test_every=3)
    first = registered(digits)
    first.train(3, test_every=3)
    folder = first.save(tmp_path / "run")
    assert call("run", "run", "--set", "rounds=6", cwd=tmp_path)[0] == 0
    continued = fe.Federation.load(folder)
    assert continued.round == 6
    continued.train(3, test_every=3)
    assert same(continued, whole)
    # The folder of the command line is continued, not replaced, and has all nine records.
    assert continued.save(folder) == folder
    assert call("run", "run", cwd=tmp_path)[0] == 0  # finished: trains nothing
    expected = registered(digits)
    expected.train(9, test_every=3)
    assert records(folder) == expected.history.records == whole.history.records
    assert same(fe.Federation.load(folder), whole)


def test_a_run_of_the_command_line_equals_one_in_python(digits, tmp_path):
    table = ["data.partition=dirichlet", "data.clients=20", "data.seed=0", "data.alpha=0.3"]
    table += ["model.hidden=[16]", "algorithm.lr=0.2", "ensemble.modes=2", "seed=3", "rounds=4"]
    table += ["ensemble.clients_per_round=6", "evaluation.every=2"]
    (tmp_path / "my.toml").write_text('[data]\nsource = "digits"\nclients = 20\n')
    options = [word for text in table for word in ("--set", text)]
    code, _, errors = call("run", "my.toml", *options, "--out", "run", cwd=tmp_path)
    assert code == 0, errors
    loaded, made = fe.Federation.load(tmp_path / "run"), registered(digits)
    made.train(4, test_every=2)
    assert same(loaded, made)
    assert loaded.history.records == made.history.records
    # With its own model and data, too.
    own = fe.Federation.load(
        tmp_path / "run", model=partial(models["mlp"], (1, 8, 8), 10, hidden=[16]), data=digits
    )
    assert same(own, made)


def test_a_model_of_ones_own_is_passed_again(digits, tmp_path):
    federation = fe.Federation(Net, digits, **OPTIONS)
    federation.train(4, test_every=2)
    folder = federation.save(tmp_path / "run")
    x = digits.x_test[:7]
    expected = federation.predict(x)
    prediction = fe.load_ensemble(folder, model=Net).predict(x)
    assert torch.equal(prediction.members, expected.members)
    assert prediction.class_names == digits.class_names
    again = fe.Federation.load(folder, model=Net)  # the data are made again by their recipe
    assert same(again, federation) and again.history.records == federation.history.records
    with pytest.raises(fe.InputError, match=r"'Net'.*load_ensemble\(folder, model=...\)"):
        fe.load_ensemble(folder)
    with pytest.raises(fe.InputError, match=r"model \('Net'\).*pass model=..."):
        fe.Federation.load(folder)
    np.savez(tmp_path / "in.npz", x=x.numpy())
    code, _, errors = call("predict", "run", "in.npz", "-o", "out.npz", cwd=tmp_path)
    assert code == 2 and "register it before training" in errors
    code, _, errors = call("run", "run", "--set", "rounds=9", cwd=tmp_path)
    assert code == 2 and "its model cannot be built from a config" in errors
    code, out, _ = call("ls", "runs", "--runs", ".", cwd=tmp_path)
    assert code == 0 and "Net" in out and "4/4" in out
    assert call("report", "run", cwd=tmp_path)[0] == 0
    page = (folder / "report.html").read_text()
    assert "curve-accuracy" in page and "Communication" in page


def test_parts_of_ones_own_are_named_and_everything_else_is_used(tmp_path):
    def loss(outputs, targets):
        return nn.functional.mse_loss(outputs, targets, reduction="none")

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = x.sum(1, keepdim=True)
    data = fe.FederatedData.from_arrays(x[:40], y[:40], [10] * 4, x_test=x[40:], y_test=y[40:])
    federation = fe.Federation(
        lambda: nn.Linear(3, 1), data, modes=2, loss=loss, seed=-5, dtype=torch.float64
    )
    federation.train(3)
    federation.evaluate()
    folder = federation.save(tmp_path / "run")
    text = (folder / "config.toml").read_text()
    assert '"data"' in text and '"loss"' in text and '"model"' in text and '"seed"' in text
    ensemble = fe.load_ensemble(folder, model=lambda: nn.Linear(3, 1))
    assert ensemble.model.task == "regression"
    expected = federation.predict(x[40:])
    torch.testing.assert_close(ensemble.predict(x[40:]).mean, expected.mean, rtol=0, atol=0)
    assert "curve-mse" in fe.report(folder).read_text()
    with pytest.raises(fe.InputError, match=r"pass data="):
        fe.Federation.load(folder, model=lambda: nn.Linear(3, 1), loss=loss)
    parts = {"model": lambda: nn.Linear(3, 1), "data": data, "loss": loss}
    assert same(fe.Federation.load(folder, **parts), federation)


def test_saving_again_replaces_the_federation_but_not_another_run(digits, tmp_path):
    long, short = registered(digits), registered(digits, modes=3)
    long.train(4)
    short.train(2)
    folder = long.save(tmp_path / "run")
    short.save(folder)
    loaded = fe.Federation.load(folder)
    assert (loaded.round, loaded.schedule.modes, len(records(folder))) == (2, 3, 2)
    assert len(list((folder / "checkpoint").iterdir())) == 1
    # The command line has extended it: the folder is now a run that must not be lost.
    assert call("run", "run", "--set", "rounds=3", cwd=tmp_path)[0] == 0
    with pytest.raises(fe.StoreError, match="run of the command line with other settings"):
        long.save(folder)
    assert fe.Federation.load(folder).round == 3


def test_loading_keeps_what_a_run_publishes(tmp_path):
    (tmp_path / "my.toml").write_text(
        'name = "private"\nrounds = 2\n[report]\npublish_clients = false\n'
        '[data]\nsource = "digits"\nclients = 10\n'
    )
    assert call("run", "my.toml", "--out", "run", cwd=tmp_path)[0] == 0
    federation = fe.Federation.load(tmp_path / "run")
    federation.train(1)
    copy = federation.save(tmp_path / "copy")
    assert "publish_clients = false" in (copy / "config.toml").read_text()
    assert json.loads((copy / "clients.json").read_text())["published"] is False
    # A change is written, and nothing else.
    changed = fe.Federation.load(tmp_path / "run", combine="logits")
    text = (changed.save(tmp_path / "changed") / "config.toml").read_text()
    assert 'combine = "logits"' in text and "publish_clients = false" in text


def test_other_data_of_the_same_recipe_are_noticed(digits, tmp_path):
    from dataclasses import replace

    noisy = replace(digits, x=255 - digits.x)
    federation = registered(noisy)
    federation.train(1)
    folder = federation.save(tmp_path / "run")
    with pytest.raises(fe.StoreError, match=r"other data than its config makes.*pass data="):
        fe.Federation.load(folder)
    assert same(fe.Federation.load(folder, data=noisy), federation)


def test_an_edited_config_is_noticed(digits, tmp_path):
    federation = registered(digits)
    federation.train(1)
    folder = federation.save(tmp_path / "run")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("hidden = [", "hidden = [ "))
    with pytest.raises(fe.StoreError, match="changed or damaged after the run finished"):
        fe.Federation.load(folder)


def test_an_untrained_federation_is_saved_as_an_unfinished_run(digits, tmp_path):
    folder = registered(digits).save(tmp_path / "run")
    assert fe.Federation.load(folder).round == 0
    with pytest.raises(fe.InputError, match="not finished"):
        fe.load_ensemble(folder)
    with pytest.raises(fe.InputError, match="no round was trained"):
        fe.report(registered(digits))


def test_a_damaged_checkpoint_is_reported(digits, tmp_path):
    federation = registered(digits)
    federation.train(1)
    folder = federation.save(tmp_path / "run")
    (file,) = (folder / "checkpoint").iterdir()
    older = shutil.copy(file, file.with_name("round-00000000.safetensors"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="Going back"):
        assert fe.Federation.load(folder).round == 1  # the copy has the same content
    Path(older).unlink()
    with pytest.raises(fe.StoreError, match="damaged"):
        fe.Federation.load(folder)


def test_a_report_without_saving(digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    federation = registered(digits)
    federation.train(2)
    federation.evaluate()
    assert fe.report(federation) == Path("report.html")
    assert fe.report(federation, tmp_path / "mine.html").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "report.html"]
