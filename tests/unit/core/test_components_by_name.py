"""Optimizers and other components by name, or as a dict with their options, as in a config."""

import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble.core.algorithm import algorithms

DATA = fe.FederatedData.from_clients([([[0.0], [1.0]], [0, 1])] * 4)


@pytest.mark.parametrize("name", sorted(algorithms))
def test_every_algorithm_takes_an_optimizer_by_name(name):
    kind = algorithms[name]
    sgd = kind(optimizer={"name": "sgd", "weight_decay": 0.1})
    assert sgd.optimizer == fe.SGD(weight_decay=0.1)
    if kind.plain_sgd:
        with pytest.raises(fe.InputError, match="needs local SGD"):
            kind(optimizer="adam")
    else:
        assert kind(optimizer="adam") == kind(optimizer=fe.Adam())


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        ("adm", "unknown optimizer 'adm': did you mean 'adam'"),
        ({"name": "adam", "momentum": 0.9}, "unknown option of optimizer 'adam' 'momentum'"),
        ({"momentum": 0.9}, "needs its name, such as {'name': 'adam'}"),
        ({"name": "sgd", "momentum": 2}, "0 <= momentum < 1"),
        ({"name": 3}, "name of optimizers is text"),
        (3, r"FedAvg needs an optimizer such as 'adam', SGD\(\) or Adam\(\); got 3"),
    ],
)
def test_wrong_optimizers(optimizer, problem):
    with pytest.raises(fe.InputError, match=problem):
        fe.FedAvg(optimizer=optimizer)


@pytest.mark.filterwarnings("ignore::fedensemble.AggregatorWarning")
def test_a_federation_takes_dicts(tmp_path):
    def trained(**arguments):
        federation = fe.Federation(lambda: nn.Linear(1, 2), DATA, modes=2, **arguments)
        list(federation.rounds(2))
        return federation

    by_dict = trained(
        algorithm={"name": "fedprox", "mu": 0.5, "lr": 0.01, "optimizer": "adam"},
        participation={"name": "devices", "ask": 4},
        aggregator={"name": "trimmed-mean", "trim": 0.1},
    )
    by_object = trained(
        algorithm=fe.FedProx(mu=0.5, lr=0.01, optimizer=fe.Adam()),
        participation=fe.Devices(ask=4),
        aggregator=fe.TrimmedMean(trim=0.1),
    )
    assert torch.equal(by_dict.ensemble.theta, by_object.ensemble.theta)
    by_dict.save(tmp_path)
    again = fe.Federation.load(tmp_path, model=lambda: nn.Linear(1, 2), data=DATA)
    assert again.algorithm == by_object.algorithm
    with pytest.raises(fe.InputError, match="unknown option of algorithm 'fedprox' 'my'"):
        fe.Federation(lambda: nn.Linear(1, 2), DATA, {"name": "fedprox", "my": 0.5})
