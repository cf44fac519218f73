"""Odd arguments in Python: arrays, numbers and things of other kinds, to all that users call."""

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble.core.algorithm import algorithms
from fedensemble.core.optimizer import optimizers
from fedensemble.core.participation import participations
from fedensemble.core.schedule import schedules
from fedensemble.data import Dataset, Standardise, load, partition, partitions

from .budget import attempt, generators

X, Y = np.ones((6, 3), np.float32), np.arange(6) % 2
THINGS: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2,
    1.5,
    1e39,
    1e300,
    float("nan"),
    float("inf"),
    10**9,
    2**63,
    10**30,
    "",
    "x",
    "\ud800",
    b"x",
    [],
    [1],
    {},
    (),
    object(),
    np.float32(1),
    np.int64(2),
    np.array([1, 2]),
    torch.tensor(1),
    torch.ones(2),
    nn.Linear,
    1j,
    "auto",
    "a\0b",
]
ARRAYS: list[Any] = [
    None,
    5,
    "x",
    [],
    [[]],
    [1, 2, 3],
    np.zeros((0, 3)),
    np.zeros((6, 0)),
    np.zeros(6),
    np.zeros((6, 3), bool),
    np.zeros((6, 3), complex),
    np.full((6, 3), np.nan),
    np.full((6, 3), 1e300),
    np.zeros((6, 3), np.longdouble),
    np.zeros((6, 3), object),
    np.array(["a"] * 6),
    np.ma.masked_array(np.zeros((6, 3)), np.eye(6, 3)),
    np.full((6, 3), 2**63, np.uint64),
    np.full(6, 2**63, np.uint64),
    np.full(6, 2**62),
    np.zeros((6, 3))[::-1],
    np.zeros((6, 3), ">f8"),
    torch.zeros(6, 3).to_sparse(),
    torch.zeros(6, 3, requires_grad=True),
    torch.zeros(6, 3, dtype=torch.bfloat16),
    np.zeros((6, 3), "M8[s]"),
    np.zeros(6, [("a", "i4")]),
    {1: 2},
    range(6),
    np.array(3),
    np.arange(6) - 1,
    np.arange(6) * 0.5,
    np.arange(6) * 1.0,
    [[1], [2, 3]],
    [10**30],
    [None] * 6,
    np.zeros((6, 3), np.uint8),
    np.zeros((6, 1, 1, 1)),
    np.zeros(6, np.int8),
]
pytestmark = pytest.mark.filterwarnings("ignore")


def model() -> nn.Module:
    return nn.Linear(3, 2)


def data(**options: Any) -> fe.FederatedData:
    return fe.FederatedData.from_clients([(X, Y)] * 4, **options)


def train(**arguments: Any) -> None:
    federation = fe.Federation(
        **{"model": model, "data": data(), "modes": 2, "engine": "loop", **arguments}
    )
    report = next(federation.rounds(1))
    assert report.loss is None or np.isfinite(report.loss)


def some(values: list[Any], purpose: int, count: int) -> list[Any]:
    return [values[random.integers(len(values))] for random in generators(purpose, count)]


@pytest.mark.parametrize("name", list(inspect.signature(fe.Federation).parameters))
def test_federation(name: str) -> None:
    for value in some(THINGS, len(name), 6):
        if name in ("epochs", "steps") and isinstance(value, int) and value > 1000:
            continue  # a long visit is what was asked for
        attempt(lambda value=value: train(**{name: value}), case=(name, value))


def test_parts() -> None:
    for random in generators(11, 150):
        keyword, registry = [
            ("algorithm", algorithms),
            ("optimizer", optimizers),
            ("participation", participations),
            ("schedule", schedules),
        ][random.integers(4)]
        kind = registry[list(registry)[random.integers(len(list(registry)))]]
        options = [field.name for field in dataclasses.fields(kind) if field.init]
        if not options:
            continue
        given = {options[random.integers(len(options))]: THINGS[random.integers(len(THINGS))]}

        def use(keyword: str = keyword, kind: Any = kind, given: dict[str, Any] = given) -> None:
            part = kind(**given)
            train(
                **(
                    {"algorithm": fe.FedAvg(optimizer=part)}
                    if keyword == "optimizer"
                    else {keyword: part}
                )
            )

        attempt(use, case=(kind, given))


@pytest.mark.parametrize("at", range(len(ARRAYS)))
def test_arrays(at: int) -> None:
    value = ARRAYS[at]
    ensemble = fe.Federation(model, data(), modes=2).ensemble
    attempt(lambda: fe.FederatedData.from_clients([(value, Y)]), case=("x", value))
    attempt(lambda: fe.FederatedData.from_clients([(X, value)]), case=("y", value))
    attempt(lambda: fe.FederatedData.from_clients(value), case=("clients", value))
    attempt(lambda: fe.FederatedData.from_arrays(X, Y, value), case=("sizes", value))
    attempt(lambda: partition(Dataset(value, Y), "iid", 2), case=("source", value))
    prediction = attempt(lambda: ensemble.predict(value), case=("predict", value))
    assert prediction is None or bool(prediction.mean.isfinite().all())
    attempt(lambda: fe.evaluate(ensemble.predict(X), value), case=("evaluate", value))
    for name in (
        "x_test",
        "y_test",
        "x_server",
        "names",
        "classes",
        "standardise",
        "notes",
        "info",
        "class_names",
    ):
        test = {"x_test": X, "y_test": Y} if name in ("x_test", "y_test") else {}
        attempt(lambda name=name, test=test: judge(**{**test, name: value}), case=(name, value))


def judge(**options: Any) -> None:
    held = data(**options)
    federation = fe.Federation(model, held, modes=1, engine="loop")
    next(federation.rounds(1))
    if held.x_test is not None:
        metrics = fe.evaluate(federation.ensemble.predict(held.x_test), held.y_test)
        assert all(np.isfinite(number) for number in metrics.values())


@pytest.mark.parametrize("at", range(len(THINGS)))
def test_other_calls(at: int) -> None:
    value = THINGS[at]
    federation = fe.Federation(model, data(), modes=2)
    calls = {
        "batch_size": lambda: federation.ensemble.predict(X, batch_size=value),
        "dropout": lambda: federation.ensemble.predict(X, dropout=value),
        "rounds": lambda: list(federation.rounds(0 if type(value) is int and value > 2 else value)),
        "load": lambda: fe.Federation.load(value, model=model, data=data()),
        "load_ensemble": lambda: fe.load_ensemble(value),
        "evaluate": lambda: fe.evaluate(value, Y),
        "mean": lambda: train(data=data(standardise=Standardise(value, (1.0,)))),
        "std": lambda: train(data=data(standardise=Standardise((0.0,), value))),
        "restore": lambda: federation.restore(federation.tensors(), value),
    }
    for name, call in calls.items():
        attempt(call, case=(name, value))


def test_partitions() -> None:
    source = load("gaussians", n=60, n_test=0)
    for random in generators(12, 60):
        name = list(partitions)[random.integers(len(list(partitions)))]
        options = [
            option
            for option in inspect.signature(partitions[name]).parameters
            if option != "source"
        ]
        given = {options[random.integers(len(options))]: THINGS[random.integers(len(THINGS))]}
        attempt(
            lambda name=name, given=given: partition(source, name, **{"clients": 3, **given}),
            case=(name, given),
        )
