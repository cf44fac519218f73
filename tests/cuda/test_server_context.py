"""The server's work as CUDA graphs is what it is without them. Skipped where there is no GPU."""

import pytest
import torch
import torch.nn.functional as F

from fedensemble import FederatedData, Federation
from fedensemble.algorithms import FedBE
from fedensemble.modeling.graphed_function import GraphedFunction, capture_graph
from fedensemble.modeling.server_context import ServerContext
from fedensemble.models import CNN
from fedensemble.testing.toy_problems import labels, numbers, small_federation, train

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SAME = 1e-9  # float64: other kernels may be chosen
ROUNDS = 4


def small(method):
    return small_federation(method, "vector", 3, 2, device="cuda")


def images(method):
    data = FederatedData.from_arrays(
        numbers(60, 1, 28, 28),
        labels(60, classes=10),
        [20, 7, 33],
        x_server=numbers(50, 1, 28, 28, word=1),
    )
    return Federation(
        lambda: CNN((1, 28, 28), 10),
        data,
        method,
        modes=2,
        device="cuda",
        batch_size=8,
        dtype=torch.float64,
    )


@pytest.mark.parametrize("made", [small, images])
def test_fedbe(made):
    method = FedBE(samples=3, server_epochs=2, server_batch=12 if made is images else 3, cycle=3)
    replayed, plain = made(method), made(method)
    for one in (
        plain.algorithm.context.graphed_outputs,
        plain.algorithm.context.graphed_gradient,
    ):
        one.capture = None
    train(replayed, ROUNDS)
    train(plain, ROUNDS)
    for one in (
        replayed.algorithm.context.graphed_outputs,
        replayed.algorithm.context.graphed_gradient,
    ):
        assert one.failure is None
        assert any(replay is not None for replay in one.cache.values())
    difference = replayed.state.modes["theta"] - plain.state.modes["theta"]
    assert float(difference.abs().max()) <= SAME


def inputs_of(shop, word):
    """Three models with inputs and targets of their own."""
    count, shape = 3, shop.unlabelled.shape
    theta = 0.1 * numbers(count, shop.model.theta_layout.total, word=word)
    x = numbers(count, *shape, word=word + 1)
    outputs = shop.graphed_outputs.function(
        theta.cuda(), theta[:, :0].cuda(), shop.unlabelled
    ).shape
    return tuple(t.cuda() for t in (theta, theta[:, :0], x, numbers(*outputs, word=word + 2)))


@pytest.mark.parametrize("made", [small, images])
def test_graphs_read_what_they_are_given(made):
    """Other numbers each time, several shapes in turn: a stale buffer or memory that is shared
    wrongly would show.
    """
    shop = made(FedBE()).algorithm.context
    kept = []
    for word in range(0, 15, 3):
        theta, buffers, x, target = inputs_of(shop, word)
        for batch in (2, 5):
            given = (F.mse_loss, theta, buffers, x[:, :batch], target[:, :batch])
            kept.append((shop.gradient(*given), shop.graphed_gradient.function(*given)))
            given = (theta, buffers, x[0, :batch])
            kept.append((shop.outputs(*given), shop.graphed_outputs.function(*given)))
    assert shop.graphed_gradient.failure is None
    assert shop.graphed_outputs.failure is None
    for one in (shop.graphed_gradient, shop.graphed_outputs):
        assert [replay is not None for replay in one.cache.values()] == [True, True]
    for replayed, plain in kept:  # all at the end: results must not be overwritten by later calls
        assert float((replayed - plain).abs().max()) <= SAME
    assert float((kept[0][1] - kept[4][1]).abs().max()) > 1e-6


def test_what_cannot_be_recorded_runs_as_it_is():
    def looks(x):
        return x * float(x.sum())  # reads a number back, which no graph may

    function, x = GraphedFunction(looks, capture_graph), torch.arange(3.0, device="cuda")
    before = torch.cuda.current_stream()
    for call in range(4):
        assert torch.equal(function(x + call), looks(x + call))
    assert function.failure
    assert function.capture is None
    assert torch.cuda.current_stream() == before
    good = GraphedFunction(torch.square, capture_graph)  # others still can
    for call in range(4):
        assert torch.equal(good(x + call), torch.square(x + call))
    assert good.failure is None
    assert all(replay is not None for replay in good.cache.values())


def test_memory_of_graphs_is_given_back():
    function, x = (
        GraphedFunction(lambda x: (x @ x).sum(0), capture_graph, cache_size=2),
        torch.ones(300, 300, device="cuda"),
    )
    for size in (300, 290):
        for _ in range(3):
            function(x[:size, :size])
    before = torch.cuda.memory_allocated()
    for size in range(100, 290, 10):
        for _ in range(3):
            assert torch.equal(
                function(x[:size, :size]), torch.full((size,), size * size, device="cuda").float()
            )
    assert torch.cuda.memory_allocated() <= before
    assert len(function.cache) == 2


def test_too_little_memory_halves_what_is_tried(monkeypatch):
    method = FedBE(samples=3, server_epochs=1)
    reference, real = train(small(method), ROUNDS), ServerContext.outputs

    def crowded(self, theta, buffers, x):
        if len(theta) * len(x) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, theta, buffers, x)

    monkeypatch.setattr(ServerContext, "outputs", crowded)
    made = train(small(method), ROUNDS)
    assert made.algorithm.context.chunk_size <= 20
    assert float((made.state.modes["theta"] - reference.state.modes["theta"]).abs().max()) <= SAME


@pytest.mark.parametrize("made", [small, images])
def test_fedbe_continues_to_the_same_bytes(made):
    """A run that goes on meets every shape for the first time again, and then runs it without a
    graph.
    """
    method = FedBE(samples=3, server_epochs=2, server_batch=12 if made is images else 3, cycle=3)
    whole, first, second = made(method), made(method), made(method)
    train(whole, ROUNDS)
    train(first, ROUNDS // 2)
    second.restore(first.tensors(), ROUNDS // 2)
    train(second, ROUNDS - ROUNDS // 2)
    assert torch.equal(whole.state.modes["theta"], second.state.modes["theta"])
