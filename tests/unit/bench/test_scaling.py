"""Memory: rounds leave nothing behind, and a stateless method needs nothing for each client."""

import gc
import tracemalloc

import pytest
import torch
from torch import nn

from fedensemble import FedAvg, FederatedData, Federation
from fedensemble.algorithms import Scaffold

_ROUNDS = 60
_PER_ROUND = 0.5  # objects; a leak is at least one a round


@pytest.fixture(autouse=True)
def only_new_objects():
    """`gc.get_objects()` leaves out those that are frozen: a million, if other tests ran before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def living():
    gc.collect()
    return gc.get_objects()


def tensor_bytes():
    """Bytes of all dense tensors alive, each storage once; other tests may keep sparse ones."""
    found = {}
    for thing in living():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def federation(clients, algorithm, per_round):
    x = torch.zeros(2 * clients, 3)
    y = torch.arange(2 * clients) % 2
    data = FederatedData.from_arrays(x, y, [2] * clients, classes=2)
    return Federation(
        lambda: nn.Linear(3, 2), data, algorithm, modes=2, clients_per_round=per_round, batch_size=2
    )


def rounds(made, count):
    for _ in made.rounds(count):
        pass


def test_many_rounds_leave_nothing_behind():
    made = federation(6, Scaffold(lr=0.01), 4)
    rounds(made, 40)  # caches fill, and every client has a row for every mode
    grown = []
    tracemalloc.start()
    try:
        for _ in range(3):  # what else lives in this process may grow once; a leak grows every time
            objects, size = len(living()), tensor_bytes()
            before, _ = tracemalloc.get_traced_memory()
            rounds(made, _ROUNDS)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
            grown.append((len(living()) - objects, tensor_bytes() - size, after - before))
    finally:
        tracemalloc.stop()
    objects, size, traced = (min(column) for column in zip(*grown, strict=True))
    assert objects < _ROUNDS * _PER_ROUND
    assert size < _ROUNDS * 8  # not one number a round
    assert traced < _ROUNDS * 600  # bytes: the record of a round in `history`; a state is larger


def test_a_stateless_method_needs_nothing_for_each_client():
    """Beyond the data, a few numbers for each client: its place, its size (also for
    participation), its samples per visit, its stratum.
    """
    clients = 100_000
    small = tensor_bytes()
    made = federation(clients, FedAvg(lr=0.1), 10)
    data = made.data
    # to participation
    told = [value for value in vars(made.costs).values() if isinstance(value, torch.Tensor)]
    known = (data.x, data.y, data.size, data.start, *made.state.schedule.values(), *told)
    listed = sum(tensor.numel() * tensor.element_size() for tensor in known)
    tracemalloc.start()
    rounds(made, 3)
    beyond = tensor_bytes() - small - listed
    python, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert listed < clients * 2 * (3 * 4 + 8) + clients * 5 * 8 + 100
    assert beyond < clients * 8 / 4, f"{beyond} bytes of tensors beyond the data"
    assert python < clients * 8 / 4, f"{python} bytes of Python objects"
    assert len(made.engine.memory) == 0
