"""Runs of one command share data with equal settings, and nothing else."""

import gc
import os

import numpy as np
import pytest
import torch
from torch import nn

from fedensemble.config.build import build_data, resolve_device
from fedensemble.config.schema import resolve
from fedensemble.data import datasets
from fedensemble.errors import StoreError
from fedensemble.experiment import setup
from fedensemble.experiment.run import RunCallbacks, run
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.experiment.studies import data_cache
from fedensemble.experiment.studies.data_cache import DataCache
from fedensemble.experiment.studies.multi_run import Task, run_all
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.models import models
from fedensemble.predict import Ensemble


def config(data=None, **changes):
    values = {
        "rounds": 1,
        "data": {"source": "digits", "partition": "iid", "clients": 6, **(data or {})},
        "model": {"name": "mlp", "hidden": [4]},
        "ensemble": {"modes": 2, "clients_per_round": 3},
        "training": {"steps": 1, "batch_size": 4},
        **changes,
    }
    return resolve_device(resolve(values, "test"))


def mine(path, **options):
    """A config with data from the user's own file."""
    return config({"source": "npz", "path": str(path), **options})


def write(path, values, seconds=0):
    np.savez(path, x=np.asarray(values, np.float32)[:, None], y=np.arange(len(values)) % 2)
    os.utime(path, (seconds, seconds))  # clocks of file systems are coarse


@pytest.fixture
def loads(monkeypatch):
    """The names of the datasets that were loaded."""
    seen = []
    monkeypatch.setattr(
        data_cache,
        "load_source",
        lambda name, options: seen.append(name) or datasets[name](**options),
    )
    return seen


def same(one, other):
    """Returns whether two datasets have equal values."""
    return setup.fingerprint(one) == setup.fingerprint(other)


def run_configs(folder, configs):
    return run_all(
        [Task(one, folder / str(place), RunCallbacks()) for place, one in enumerate(configs)]
    )


def test_a_table_loads_its_dataset_once(tmp_path, loads):
    divided = {"partition": "dirichlet", "alpha": 0.5}
    configs = [
        config(seed=0),
        config(seed=1),
        config(divided, seed=2),
        config(seed=0, algorithm={"name": "fedprox"}),
    ]
    run_configs(tmp_path, configs)
    assert loads == ["digits"]


def test_other_datasets_and_options_are_loaded(loads):
    shared = DataCache()
    datasets = [
        shared.build_data(one)
        for one in (config(), config({"test_fraction": 0.3}), config({"source": "gaussians"}))
    ]
    assert loads == ["digits", "digits", "gaussians"]
    assert len({data.x_test.shape for data in datasets}) == 3


def test_the_same_data_are_one_object():
    shared = DataCache()
    first = shared.build_data(config())
    assert shared.build_data(config(algorithm={"name": "fedprox"}, rounds=9)) is first
    assert shared.build_data(config({"seed": 0}, seed=5)) is first
    assert shared.build_data(config(seed=5)) is not first


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seed": 3},
        {"validation": 0.25},
        {"test_examples": 9},
        {"server_share": 0.5},
        {"clients": 4},
        {"partition": "dirichlet", "alpha": 0.1},
    ],
)
def test_shared_or_not_the_data_are_the_same(options):
    shared = DataCache()
    others = [
        shared.build_data(config(other))
        for other in ({}, {"validation": 0.5}, {"server_share": 0.1})
    ]
    assert same(shared.build_data(config(options)), build_data(config(options)))
    assert [same(data, build_data(config())) for data in others] == [True, False, False]


def test_a_file_that_has_changed_is_read_again(tmp_path, loads):
    path, shared = tmp_path / "mine.npz", DataCache()
    write(path, range(12))
    before = shared.build_data(mine(path))
    assert shared.build_data(mine(path)) is before
    write(path, range(1, 13), seconds=1)
    after = shared.build_data(mine(path))
    assert loads == ["npz", "npz"]
    assert before.x.sum() == sum(range(12))
    assert after.x.sum() == sum(range(1, 13))


def test_a_changed_file_of_the_server_is_read_again(tmp_path, loads):
    path, server, shared = tmp_path / "mine.npz", tmp_path / "server.npz", DataCache()
    write(path, range(12))
    write(server, [5])
    before = shared.build_data(mine(path, server_file=str(server)))
    write(server, [7], seconds=1)
    after = shared.build_data(mine(path, server_file=str(server)))
    assert loads == ["npz"]
    assert [before.x_server.item(), after.x_server.item()] == [5, 7]


def test_a_finished_table_still_notices_a_changed_file(tmp_path):
    path = tmp_path / "mine.npz"
    write(path, range(12))
    one = config({"source": "npz", "path": str(path), "validation": 0.5})
    run_configs(tmp_path, [one])
    run_configs(tmp_path, [one])
    write(path, range(1, 13), seconds=1)
    with pytest.raises(StoreError, match="has changed since"):
        run_configs(tmp_path, [one])


def test_large_datasets_and_unused_data_are_freed(monkeypatch, loads):
    shared = DataCache()
    shared.build_data(config())
    gc.collect()
    assert not shared._data
    shared.build_data(config(seed=1))
    assert loads == ["digits"]
    monkeypatch.setattr(data_cache, "MAX_BYTES", 1000)
    shared.build_data(config({"source": "gaussians"}))
    assert shared._source is None


def test_a_model_that_modifies_its_inputs_does_not_change_shared_data(tmp_path, monkeypatch):
    class Writing(nn.Module):
        def __init__(self, shape: list[int], outputs: int) -> None:
            super().__init__()
            self.inner = nn.Linear(shape[0], outputs)

        def forward(self, x):
            return self.inner(x.mul_(-3))

    monkeypatch.setitem(models._items, "writing", Writing)
    shared = []
    original = DataCache.build_data
    monkeypatch.setattr(
        DataCache, "build_data", lambda self, one: shared.append(original(self, one)) or shared[-1]
    )
    data = {"source": "gaussians", "server_share": 0.2}
    methods = [{"name": "fedavg"}, {"name": "fedavg", "lr": 0.01}, {"name": "fedprox"}]
    for engine in ("vector", "loop"):
        configs = [
            config(
                data,
                model={"name": "writing"},
                algorithm=method,
                engine={"name": engine, "dtype": "float32"},
            )
            for method in methods
        ]
        run_configs(tmp_path / engine, configs)
        for place, one in enumerate(configs):
            run(one, tmp_path / f"{engine}-alone" / str(place))
            records = [
                RunFolder(tmp_path / way / str(place)).metrics()
                for way in (engine, f"{engine}-alone")
            ]
            assert records[0][-1]["test"]["nll"] == pytest.approx(
                records[1][-1]["test"]["nll"], rel=1e-5
            )
    fresh = build_data(configs[0])
    for data in shared:
        assert all(
            torch.equal(getattr(data, name), getattr(fresh, name))
            for name in ("x", "y", "x_test", "x_server")
        )


def test_the_last_prediction_is_kept_without_predicting_again(tmp_path, monkeypatch):
    calls, original = [], Ensemble.predict
    monkeypatch.setattr(
        Ensemble, "predict", lambda self, x, **how: calls.append(how) or original(self, x, **how)
    )
    run(config(rounds=3, evaluation={"every": 2, "dropout": True}), tmp_path / "whole")
    assert [call["dropout"] for call in calls] == [False, True] * 2


def test_initial_weights_are_torchs_own_for_a_seed_and_the_global_rng_is_unchanged():
    torch.manual_seed(11)
    expected = nn.Linear(3, 2)
    functional_model = FunctionalModel(
        lambda: nn.Linear(3, 2), "cross_entropy", torch.zeros(1, dtype=torch.int64)
    )
    waiting, state = len(torch.cuda._queued_calls), torch.get_rng_state()
    built = functional_model.build(11)
    assert torch.equal(built.weight, expected.weight)
    assert torch.equal(built.bias, expected.bias)
    assert len(torch.cuda._queued_calls) == waiting
    assert torch.equal(torch.get_rng_state(), state)
