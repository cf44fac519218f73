"""Runs that are stacked, with one server's step for all, give the results of each alone."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedensemble import Federation
from fedensemble.algorithms import FedAvg
from fedensemble.checkpoint_file import read_checkpoint
from fedensemble.config.build import build_data, build_federation, resolve_device
from fedensemble.config.schema import resolve
from fedensemble.config.toml import merge
from fedensemble.core.algorithm import algorithms
from fedensemble.errors import DivergedError, InputError
from fedensemble.experiment.run import RunCallbacks, run
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.experiment.studies import run_groups, run_stack
from fedensemble.experiment.studies.multi_run import Task, run_all
from fedensemble.experiment.studies.run_stack import RunStack, stack_key

# Unequal clients with different numbers of local steps, partial participation, modes without
# clients in some rounds, and a rate that decays.
BASE = {
    "rounds": 7,
    "data": {"source": "digits", "clients": 12, "partition": "dirichlet", "alpha": 0.5},
    "model": {"name": "mlp", "hidden": [6]},
    "algorithm": {"name": "fedavg", "lr": 0.1, "lr_decay": 0.8, "lr_decay_every": 2},
    "ensemble": {"modes": 3, "clients_per_round": 4, "strata": 2},
    "training": {"epochs": 1, "batch_size": 32},
    "evaluation": {"every": 5},
    "engine": {"dtype": "float64"},
}


def config(**changes):
    return resolve_device(resolve(merge(BASE, changes), "test"))


def tensors(folder):
    return read_checkpoint(RunFolder(folder).modes_file)[0]


@pytest.fixture
def stacked(monkeypatch):
    """The number of runs in each round of a stack."""
    sizes, original = [], RunStack.train_round

    def counted(self):
        outcomes = original(self)
        sizes.append(len(outcomes))
        return outcomes

    monkeypatch.setattr(RunStack, "train_round", counted)
    return sizes


def compare(tmp_path, configs):
    """Trains runs alone and together, and compares their files."""
    alone = [tmp_path / f"alone{n}" for n in range(len(configs))]
    together = [tmp_path / f"together{n}" for n in range(len(configs))]
    for one, folder in zip(configs, alone, strict=True):
        run(one, folder)
    run_all([Task(c, f, RunCallbacks()) for c, f in zip(configs, together, strict=True)])
    for one, other in zip(alone, together, strict=True):
        expected, found = tensors(one), tensors(other)
        assert set(expected) == set(found)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10)
        for a, b in zip(RunFolder(one).metrics(), RunFolder(other).metrics(), strict=True):
            assert b.pop("loss") == pytest.approx(a.pop("loss"), rel=1e-9)
            assert set(a) == set(b)
            for name in ("round", "age", "visits", "modes_trained", "bytes_up", "bytes_down"):
                assert a[name] == b[name]


def rates(name, seeds=(0, 1), **options):
    """Runs with two rates for each seed; their floats differ, and their seeds."""
    return [
        config(algorithm={"name": name, "lr": lr, **options}, seed=seed)
        for lr in (0.03, 0.1)
        for seed in seeds
    ]


STACKED = ("fedavg", "fedprox", "scaffold", "feddyn", "fedadam", "fedyogi", "fedavgm", "diana")


@pytest.mark.parametrize("name", STACKED)
def test_an_algorithm_is_stacked_and_each_run_is_as_alone(tmp_path, stacked, name):
    compare(tmp_path, rates(name))
    assert stacked == [4] * 7


# Their modes interact, their messages vary, or their parts belong to a run.
@pytest.mark.parametrize("name", ["fedcross", "ifca", "fedac", "ditto"])
def test_other_algorithms_train_without_a_stack(tmp_path, stacked, name):
    compare(tmp_path, rates(name))
    assert stacked == []


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        ("fedprox", "mu", (0.0, 0.01, 0.5)),
        ("fedadam", "server_lr", (0.01, 0.1, 0.3)),
        ("fedadam", "beta1", (0.0, 0.5, 0.9)),
        ("fedadam", "tau", (1e-3, 1e-2, 0.1)),
        ("fedavgm", "beta", (0.1, 0.5, 0.9)),
        ("feddyn", "alpha", (0.01, 0.1, 1.0)),
        ("fedavg", "lr_decay", (0.5, 0.9, 1.0)),
    ],
)
def test_hyperparameters_of_clients_and_server_differ(tmp_path, stacked, name, key, values):
    compare(tmp_path, [config(algorithm={"name": name, "lr": 0.1, key: value}) for value in values])
    assert stacked == [3] * 7


@pytest.mark.parametrize(
    "changes",
    [
        {"average": {"name": "ema", "decay": 0.8}},
        {"average": {"name": "swag"}},
        {"algorithm": {"weighting": "uniform"}},
        {"algorithm": {"optimizer": {"name": "sgd", "momentum": 0.9}}},
        {"algorithm": {"optimizer": "adam"}},
        {"ensemble": {"schedule": "independent"}},
        {"ensemble": {"modes": 1, "strata": 1}},
        {"data": {"partition": "classes", "classes_per_client": 2}},
    ],
    ids=str,
)
def test_settings(tmp_path, stacked, changes):
    configs = [
        config(**merge(changes, {"algorithm": {"lr": lr}, "seed": seed}))
        for lr, seed in ((0.05, 0), (0.1, 0), (0.1, 5))
    ]
    compare(tmp_path, configs)
    assert stacked == [3] * configs[0].rounds


@pytest.mark.parametrize(
    "changes",
    [
        {"participation": {"name": "devices", "ask": 6}},
        {"participation": {"stragglers": 0.5}},
        {"aggregator": {"name": "median"}},
        {"ensemble": {"schedule": "worst-mode"}},
        {"ensemble": {"shared": ["layers.1.*"]}},
        {"ensemble": {"personal": ["layers.3.*"]}},
        {"engine": {"options": {"block": 5}}},
    ],
    ids=str,
)
def test_runs_that_do_not_fit_train_without_a_stack(tmp_path, stacked, changes):
    compare(
        tmp_path, [config(**merge(changes, {"algorithm": {"lr": lr}})) for lr in (0.1, 0.2, 0.3)]
    )
    assert stacked == []


def test_runs_of_different_shapes_are_stacked_apart(tmp_path, stacked):
    configs = [
        config(algorithm={"lr": lr}, ensemble={"modes": modes})
        for lr in (0.05, 0.1, 0.2)
        for modes in (2, 3)
    ]
    compare(tmp_path, configs)
    assert stacked == [3] * 14


def test_few_runs_of_each_shape_train_in_one_batch_instead(tmp_path, stacked):
    compare(tmp_path, [config(ensemble={"modes": modes}) for modes in (1, 2, 3, 3)])
    assert stacked == []


def test_runs_with_different_numbers_of_rounds(tmp_path, stacked):
    configs = [
        config(algorithm={"lr": 0.01 * n}, rounds=rounds)
        for n, rounds in enumerate((3, 7, 7, 5), 1)
    ]
    compare(tmp_path, configs)
    # The last two are no stack.
    assert stacked == [4, 4, 4, 3, 3]


def test_a_run_that_diverges_leaves_the_stack(tmp_path, stacked):
    configs = [config(algorithm={"lr": lr}) for lr in (1e200, 0.05, 0.1, 0.2)]
    folders = [tmp_path / str(n) for n in range(4)]
    errors = []
    tasks = [
        Task(c, f, RunCallbacks(on_error=errors.append))
        for c, f in zip(configs, folders, strict=True)
    ]
    bad, *good = run_all(tasks)
    assert isinstance(bad, DivergedError) and errors == [bad]
    with pytest.raises(DivergedError) as alone:
        run(configs[0], tmp_path / "alone")
    assert str(bad) == str(alone.value)
    assert RunFolder(folders[0]).state == "diverged"
    assert stacked[0] == 4 and stacked[-1] == 3
    for one, folder, summary in zip(configs[1:], folders[1:], good, strict=True):
        expected = run(one, tmp_path / f"alone{one.algorithm['lr']}")
        assert summary["test"]["nll"] == pytest.approx(expected["test"]["nll"], rel=1e-9)
        assert RunFolder(folder).state == "done"


def test_control_flow_on_a_hyperparameter_of_the_server(tmp_path, stacked):
    @dataclass(frozen=True, kw_only=True)
    class Looking(FedAvg):
        """Branches on a hyperparameter, which fails where its values differ."""

        much: float = 0.5

        def server_update(self, mode, uploads, cohort):
            if self.much > 0.7:
                return {"theta": 0.5 * (mode["theta"] + uploads["theta"])}
            return {"theta": uploads["theta"]}

    algorithms.register("looking")(Looking)
    try:
        compare(
            tmp_path,
            [config(algorithm={"name": "looking", "much": much}) for much in (0.5, 0.9, 0.9)],
        )
        assert stacked == []
    finally:
        algorithms._items.pop("looking")


def test_an_error_of_a_visit_is_the_error_of_all_runs(monkeypatch):
    """Such as one visit that does not fit into memory."""
    data = build_data(config())
    runs = {n: build_federation(config(algorithm={"lr": 0.1 + n}), data) for n in range(3)}

    def full(*arguments, **options):
        raise InputError("One visit does not fit.")

    monkeypatch.setattr(run_stack, "train_stacked", full)
    outcomes = run_groups.Groups().advance(runs)
    assert [str(error) for _, error in outcomes] == ["One visit does not fit."] * 3
    assert all(federation.round == 0 for federation in runs.values())


def test_an_interrupted_stack_is_resumed(tmp_path, stacked):
    configs = rates("scaffold")
    folders = [tmp_path / str(n) for n in range(4)]

    def stop(report, metrics):
        if report.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(
            [
                Task(c, f, RunCallbacks(on_round_end=stop))
                for c, f in zip(configs, folders, strict=True)
            ]
        )
    run_all([Task(c, f, RunCallbacks()) for c, f in zip(configs, folders, strict=True)])
    assert len(stacked) >= 7
    for one, folder in zip(configs, folders, strict=True):
        run(one, whole := tmp_path / f"whole{folder.name}")
        for name, value in tensors(whole).items():
            torch.testing.assert_close(tensors(folder)[name], value, rtol=0, atol=1e-10)


def test_running_statistics_and_frozen_parameters():
    def model():
        layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 10))
        layers[1].bias.requires_grad_(False)
        return layers

    data = build_data(config())

    def federations():
        return [
            Federation(
                model,
                data,
                FedAvg(lr=lr),
                modes=3,
                strata=2,
                clients_per_round=4,
                batch_size=16,
                dtype=torch.float64,
            )
            for lr in (0.05, 0.1, 0.2)
        ]

    alone, together = federations(), federations()
    stack = RunStack(together)
    for _ in range(5):
        stack.train_round()
        for federation in alone:
            federation.run_round()
    for one, other in zip(alone, together, strict=True):
        assert one.state.buffers.shape[1] > 6
        torch.testing.assert_close(one.tensors(), other.tensors(), rtol=1e-9, atol=1e-11)


def test_plans_are_made_once_for_runs_with_equal_seeds(monkeypatch):
    configs = [config(algorithm={"lr": lr}, seed=seed) for lr in (0.1, 0.2, 0.3) for seed in (0, 1)]
    data = {seed: build_data(config(seed=seed)) for seed in (0, 1)}
    federations = [build_federation(one, data[one.seed]) for one in configs]
    made, original = [], run_stack.make_stacked_plan

    def counted(engines, *rest):
        made.append(len(engines))
        return original(engines, *rest)

    monkeypatch.setattr(run_stack, "make_stacked_plan", counted)
    stack = RunStack(federations)
    for _ in range(3):
        stack.train_round()
    assert made == [2] * 3


def test_a_run_that_somebody_else_has_changed_is_taken_as_it_is():
    configs = [config(algorithm={"lr": lr}) for lr in (0.1, 0.2, 0.3)]
    data = build_data(configs[0])
    federations, alone = ([build_federation(one, data) for one in configs] for _ in range(2))
    stack = RunStack(federations)
    for round in range(4):
        stack.train_round()
        for federation in alone:
            federation.run_round()
        if round == 1:
            for group in (federations, alone):
                changed = {
                    name: 0.5 * value
                    for name, value in group[1].tensors().items()
                    if "theta" in name
                }
                group[1].restore({**group[1].tensors(), **changed}, group[1].round)
    for one, other in zip(federations, alone, strict=True):
        torch.testing.assert_close(one.tensors(), other.tensors(), rtol=1e-10, atol=1e-11)


def test_stacks_are_used_by_groups_of_enough_runs():
    one = config()
    federations = [build_federation(one, build_data(one)) for _ in range(2)]
    assert stack_key(federations[0]) == stack_key(federations[1]) is not None
    groups = run_groups.Groups()
    groups.advance(dict(enumerate(federations)))
    assert all(group.stack is None for group in groups._groups[0, 1])
