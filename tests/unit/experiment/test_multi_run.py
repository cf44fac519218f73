"""Runs that train in one batch give the results that each of them gives alone."""

from dataclasses import dataclass

import pytest
import torch

from fedensemble.algorithms import FedAvg
from fedensemble.checkpoint_file import read_checkpoint
from fedensemble.config.build import build_data, build_federation, resolve_device
from fedensemble.config.schema import resolve
from fedensemble.core.algorithm import algorithms
from fedensemble.core.types import Plan
from fedensemble.engines.local import run_visits
from fedensemble.errors import DivergedError, StoreError
from fedensemble.experiment.run import RunCallbacks, run
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.experiment.studies import run_groups
from fedensemble.experiment.studies.multi_run import Task, run_all

BASE = {
    "rounds": 4,
    "data": {"source": "digits", "clients": 12, "partition": "dirichlet", "alpha": 0.5},
    "model": {"name": "mlp", "hidden": [8]},
    "algorithm": {"name": "fedavg", "lr": 0.1},
    "ensemble": {"modes": 2, "clients_per_round": 4},
    "training": {"epochs": 1, "batch_size": 8},
    "evaluation": {"every": 2},
    "engine": {"dtype": "float64"},
}


def config(**changes):
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for name, value in changes.items():
        table, _, key = name.partition("__")
        if key:
            values[table][key] = value
        else:
            values[table] = value
    return resolve_device(resolve(values, "test"))


def theta(folder):
    return read_checkpoint(RunFolder(folder).path / "modes.safetensors")[0]


def compare_alone_and_batched(tmp_path, configs, monkeypatch):
    """Compares runs trained alone and in a batch; returns the batch size of each engine call."""
    sizes, original = [], run_visits.run_visits

    def counted(engines, requests):
        sizes.append(len(requests))
        return original(engines, requests)

    alone = [tmp_path / f"alone{n}" for n in range(len(configs))]
    for folder, one in zip(alone, configs, strict=True):
        run(one, folder)
    monkeypatch.setattr(run_groups, "run_visits", counted)
    batched = [tmp_path / f"batched{n}" for n in range(len(configs))]
    summaries = run_all([Task(c, f, RunCallbacks()) for c, f in zip(configs, batched, strict=True)])
    for one, other, summary in zip(batched, alone, summaries, strict=True):
        assert summary == RunFolder(one).summary()
        for name, value in theta(other).items():
            torch.testing.assert_close(theta(one)[name], value, rtol=0, atol=1e-11)
        for a, b in zip(RunFolder(one).metrics(), RunFolder(other).metrics(), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-11)
            assert a["bytes_up"] == b["bytes_up"]
    return sizes


def test_seeds_hyperparameters_modes_and_partitions_differ(tmp_path, monkeypatch):
    prox = {"name": "fedprox", "lr": 0.1}
    configs = [
        config(algorithm={**prox, "mu": 0.1}, seed=0),
        config(algorithm={**prox, "mu": 1.0}, seed=1),
        config(algorithm={**prox, "mu": 0.1, "lr": 0.3}, seed=2, ensemble__modes=3),
        config(
            algorithm={**prox, "mu": 0.5},
            rounds=3,
            data={"source": "digits", "clients": 12, "partition": "iid"},
        ),
    ]
    assert compare_alone_and_batched(tmp_path, configs, monkeypatch) == [4, 4, 4, 3]


def test_modes_of_different_runs_are_not_mixed(tmp_path, monkeypatch):
    method = {"name": "fedcross", "lr": 0.1}
    configs = [
        config(algorithm={**method, "alpha": 0.7}, seed=0),
        config(algorithm={**method, "alpha": 0.9, "deploy": "ensemble"}, seed=1, ensemble__modes=4),
        config(algorithm={**method, "alpha": 0.7, "deploy": "ensemble"}, seed=1, ensemble__modes=4),
    ]
    assert compare_alone_and_batched(tmp_path, configs, monkeypatch) == [2] * 4


@pytest.mark.parametrize("name", ["scaffold", "fedadam", "diana"])
def test_algorithms_with_client_state_server_state_and_randomness(tmp_path, monkeypatch, name):
    configs = [config(algorithm={"name": name, "lr": 0.05}, seed=seed) for seed in (0, 1)]
    assert compare_alone_and_batched(tmp_path, configs, monkeypatch) == [2] * 4


def test_fedac_has_the_mu_of_its_own_run(tmp_path, monkeypatch):
    """Left out, it follows from the clients per mode: 4, 2 and 1 here."""
    configs = [
        config(algorithm={"name": "fedac", "lr": 0.1}, ensemble__modes=modes) for modes in (1, 2, 4)
    ]
    assert compare_alone_and_batched(tmp_path, configs, monkeypatch) == [3] * 4


def test_clients_of_batched_runs_draw_their_own_models(tmp_path, monkeypatch):
    method = {"name": "fedma", "lr": 0.1, "own_rounds": 2}
    configs = [config(algorithm=method, seed=seed) for seed in (0, 1)]
    assert compare_alone_and_batched(tmp_path, configs, monkeypatch) == [2] * 4


def test_runs_with_different_models_are_not_batched(tmp_path, monkeypatch):
    configs = [
        config(),
        config(model={"name": "mlp", "hidden": [5]}),
        config(engine={"name": "loop", "dtype": "float64"}),
    ]
    assert compare_alone_and_batched(tmp_path, configs, monkeypatch) == []


def test_an_algorithm_with_control_flow_on_a_hyperparameter(tmp_path, monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Looking(FedAvg):
        """Branches on a hyperparameter, which fails in a batch where its values differ."""

        much: float = 0.5

        def local_training(self, sent, memory, problem):
            uploads, memory = super().local_training(sent, memory, problem)
            return (
                ({"theta": uploads["theta"] * 0.5}, memory)
                if self.much > 0.7
                else (uploads, memory)
            )

    algorithms.register("looking")(Looking)
    try:
        configs = [
            config(algorithm={"name": "looking", "lr": 0.1, "much": much}) for much in (0.5, 0.9)
        ]
        assert compare_alone_and_batched(tmp_path, configs, monkeypatch) == [2]
    finally:
        algorithms._items.pop("looking")


def test_each_run_of_a_batch_shares_its_own_parameters(tmp_path, monkeypatch):
    configs = [config(), config(ensemble__shared=["layers.1.*"]), config(ensemble__shared=["*"])]
    assert 3 in compare_alone_and_batched(tmp_path, configs, monkeypatch)
    shared = []
    for number in range(3):
        found = theta(tmp_path / f"batched{number}")
        names = {name.partition("/")[2] for name in found}
        shared.append({n for n in names if torch.equal(found[f"0/{n}"], found[f"1/{n}"])})
    assert shared == [set(), {"layers.1.weight", "layers.1.bias"}, names]


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    good, bad = (
        config(seed=1, rounds=40),
        config(algorithm={"name": "fedavg", "lr": 1e200}, rounds=40),
    )
    folders = [tmp_path / "bad", tmp_path / "good"]
    errors = []
    tasks = [
        Task(c, f, RunCallbacks(on_error=errors.append))
        for c, f in zip((bad, good), folders, strict=True)
    ]
    done = []
    outcomes = run_all(tasks, done.append)
    assert isinstance(outcomes[0], DivergedError) and "round" in str(outcomes[0])
    assert errors == [outcomes[0]] and sorted(done) == [0, 1]
    assert outcomes[1] == RunFolder(folders[1]).summary()
    assert [RunFolder(folder).state for folder in folders] == ["diverged", "done"]


def test_an_interrupted_group_is_resumed(tmp_path):
    configs, folders = [config(seed=seed) for seed in (0, 1)], [tmp_path / "a", tmp_path / "b"]
    rounds = []

    def stop(report, metrics):
        rounds.append(report.round)
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(
            [
                Task(c, f, RunCallbacks(on_round_end=stop))
                for c, f in zip(configs, folders, strict=True)
            ]
        )
    run_all([Task(c, f, RunCallbacks()) for c, f in zip(configs, folders, strict=True)])
    run(configs[1], tmp_path / "whole")
    for name, value in theta(tmp_path / "whole").items():
        torch.testing.assert_close(theta(folders[1])[name], value, rtol=0, atol=1e-11)


def test_a_hyperparameter_that_other_values_are_derived_from(tmp_path, monkeypatch):
    method = {"name": "diana", "lr": 0.05, "compressor": "rand-k"}
    configs = [config(algorithm={**method, "share": share}) for share in (0.1, 0.9)]
    compare_alone_and_batched(tmp_path, configs, monkeypatch)


def test_data_are_concatenated_once(tmp_path, monkeypatch):
    sizes, original = [], run_groups.run_visits

    def counted(engines, requests):
        sizes.append({len(engine.data.x) for engine in engines})
        return original(engines, requests)

    monkeypatch.setattr(run_groups, "run_visits", counted)
    monkeypatch.setattr(run_groups, "FEWEST", 9)  # no stacks
    configs = [config(seed=seed, rounds=2 + seed) for seed in range(4)]  # one after another is done
    run_all([Task(c, tmp_path / str(c.seed), RunCallbacks()) for c in configs])
    assert len(sizes) == 4
    assert sizes == [sizes[0]] * 4


def test_the_same_run_twice(tmp_path):
    same, other = config(), config(seed=1)
    tasks = [Task(c, tmp_path / c.hash(), RunCallbacks()) for c in (same, other, same)]
    done = []
    summaries = run_all(tasks, done.append)
    assert summaries[0] == summaries[2] != summaries[1]
    assert sorted(done) == [0, 1, 2]


def test_runs_that_cannot_be_batched_do_not_wait_for_each_other(tmp_path):
    order = []

    def watcher(seed):
        return RunCallbacks(
            on_train_start=lambda config, round: order.append((seed, "start")),
            on_round_end=lambda report, metrics: order.append((seed, report.round)),
        )

    engine = {"name": "loop", "dtype": "float64"}
    configs = [config(engine=engine, seed=seed, rounds=2) for seed in (0, 1)]
    run_all([Task(c, tmp_path / str(c.seed), watcher(c.seed)) for c in configs])
    assert order == [(0, "start"), (0, 1), (0, 2), (1, "start"), (1, 1), (1, 2)]


def test_prefetched_inputs_are_dropped_when_data_are_concatenated():
    engines = [build_federation(one, build_data(one)).engine for one in (config(), config(seed=1))]
    plan, before = Plan(torch.tensor([0, 1]), torch.tensor([0, 0])), engines[1].data
    expected = before.x[engines[1].batch_plan(plan, 0).batch_index]
    engines[1].prefetch(plan, 0)
    run_visits.concatenate_data(engines)
    assert torch.equal(engines[1].data.x[engines[1].batch_plan(plan, 0).batch_index], expected)


def test_no_more_data_are_concatenated_than_fit_into_memory(tmp_path, monkeypatch):
    one = build_data(config()).x.nbytes
    monkeypatch.setattr(run_groups, "_CPU_BYTES", 4 * one)
    monkeypatch.setattr(run_groups, "FEWEST", 9)  # no stacks
    # the last one has a round more
    configs = [config(seed=seed, rounds=2 + seed // 5) for seed in range(6)]
    assert compare_alone_and_batched(tmp_path, configs, monkeypatch) == [4, 2, 4, 2]


def test_a_run_that_cannot_be_written_does_not_stop_the_others(tmp_path):
    def full(report, metrics):
        raise StoreError("no space")

    watchers = [RunCallbacks(on_round_end=full), RunCallbacks()]
    with pytest.raises(StoreError, match="no space"):
        run_all(
            [Task(config(seed=n), tmp_path / str(n), watcher) for n, watcher in enumerate(watchers)]
        )
    assert RunFolder(tmp_path / "1").done
    run(config(), tmp_path / "0")  # its folder is unlocked
