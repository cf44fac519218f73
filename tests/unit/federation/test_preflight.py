"""The checks before round 1: their order and their log line."""

import logging

import pytest
import torch
from torch import nn

from fedensemble import FedAvg, FederatedData, Federation, InputError
from fedensemble.algorithms import Scaffold
from fedensemble.core.optimizer import SGD

DATA = FederatedData.from_clients([([[0.0], [0.1]], [0, 0]), ([[1.0], [0.9]], [1, 1])])

LARGE = FederatedData.from_clients([([[0.0], [0.1]], [0, 299]), ([[1.0], [0.9]], [1, 1])])


def test_one_log_line_names_the_checks(caplog):
    with caplog.at_level(logging.DEBUG, logger="fedensemble"):
        federation = Federation(lambda: nn.Linear(1, 2), DATA, FedAvg(lr=0.1), modes=2)
    lines = [r.getMessage() for r in caplog.records if r.name == "fedensemble"]
    assert len(lines) == 1
    assert lines[0].startswith("Pre-flight checks for 2 modes passed in ")
    assert "model outputs and loss" in lines[0]
    assert str(federation.visit_memory) in lines[0]
    assert {r.levelno for r in caplog.records} == {logging.DEBUG}


def test_no_log_line_if_a_check_fails(caplog):
    with caplog.at_level(logging.DEBUG, logger="fedensemble"), pytest.raises(InputError):
        Federation(lambda: nn.Linear(7, 2), DATA, modes=2)
    assert not caplog.records


def test_the_first_mistake_is_reported():
    mistakes = {
        "data": ({"data": [1, 2]}, "data must be a FederatedData"),
        "seed": ({"seed": "zero"}, "seed must be an integer"),
        "algorithm": ({"algorithm": 3}, "algorithm must be an Algorithm"),
        "device": ({"device": 3}, "device is 'cpu'"),
        "model": ({"model": lambda: nn.Linear(7, 2)}, "The model cannot take inputs"),
        "last_batch": ({"last_batch": 3}, "last_batch is 'keep'"),
        "engine_options": ({"engine_options": 3}, "engine_options must be a dict"),
        "combine": ({"combine": "votes"}, "combine is 'probabilities'"),
    }
    arguments = {"model": lambda: nn.Linear(1, 2), "data": DATA, "dtype": torch.float32}
    wrong = {}
    for mistake, message in reversed(mistakes.values()):
        wrong |= mistake
        with pytest.raises(InputError, match=message):
            Federation(**{**arguments, **wrong})


def test_the_memory_of_a_visit_has_all_its_parts():
    size = 2 * 300 * 4  # of the parameters
    for algorithm, slots, state in (
        (FedAvg(lr=0.1), 0, 0),
        (FedAvg(lr=0.1, optimizer=SGD(momentum=0.9)), 1, 0),
        (Scaffold(lr=0.1), 0, 1),
    ):
        federation = Federation(lambda: nn.Linear(1, 300), LARGE, algorithm, modes=2)
        memory = federation.visit_memory
        assert memory.parameters == memory.gradients == size
        assert memory.optimizer == slots * size
        assert memory.client_state == state * size  # the control variate
        assert memory.uploads >= size
        assert memory.activations >= 300 * 4  # the outputs
        assert memory.block == federation.engine.block
        assert ("optimizer state 2.3 KiB" in str(memory)) == bool(slots)
    given = Federation(lambda: nn.Linear(1, 300), LARGE, modes=2, engine_options={"block": 7})
    assert given.visit_memory.block == 7
    assert given.visit_memory.activations is None
    assert "activations" not in str(given.visit_memory)
    assert Federation(lambda: nn.Linear(1, 300), LARGE, engine="loop").visit_memory.block == 1
