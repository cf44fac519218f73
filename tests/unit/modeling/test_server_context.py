"""The server's models all at once are its models one by one, whatever fits into memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import FederatedData, Federation, InputError
from fedensemble.algorithms import FedBE
from fedensemble.experiment.records import run_notes
from fedensemble.modeling.server_context import ServerContext
from fedensemble.testing.toy_problems import numbers, small_federation, train

CLOSE = 1e-12  # float64
MODELS = 6


@pytest.fixture
def shop():
    return small_federation(FedBE(), "loop", 2, 2).algorithm.workshop


def some_models(shop):
    theta = 0.5 * numbers(MODELS, shop.learner.theta_layout.total)
    shares = numbers(2, MODELS, word=1).softmax(-1)
    return shares, theta, theta[:, :0]


def one_by_one(shop, shares, theta):
    said = torch.stack([shop.learner.outputs(one, theta[0, :0], shop.unlabelled) for one in theta])
    said = said.softmax(-1) if shop.learner.task == "classification" else said
    return torch.einsum("km,mnc->knc", shares, said)


def crowded(monkeypatch, most):
    """Lets calls of more than `most` models times inputs fail; returns the sizes of all calls."""
    calls, real = [], ServerContext.outputs

    def outputs(self, theta, buffers, x):
        calls.append((len(theta), len(x)))
        if len(theta) * len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, theta, buffers, x)

    monkeypatch.setattr(ServerContext, "outputs", outputs)
    return calls


def test_on_a_cpu_nothing_is_recorded(shop):
    _, theta, buffers = some_models(shop)
    for _ in range(3):
        shop.outputs(theta, buffers, shop.unlabelled)
    assert shop.outputs_of.record is None
    assert shop.gradient_of.record is None
    assert not shop.outputs_of.known


def test_outputs_and_gradients_are_those_of_each_model(shop):
    _, theta, buffers = some_models(shop)
    said = shop.outputs(theta, buffers, shop.unlabelled)
    target = numbers(*said.shape, word=2)
    x = numbers(MODELS, *shop.unlabelled.shape, word=3)
    slopes = shop.gradient(F.mse_loss, theta, buffers, x, target)
    for at, one in enumerate(theta):
        alone = shop.learner.outputs(one, buffers[at], shop.unlabelled)
        torch.testing.assert_close(said[at], alone, rtol=0, atol=CLOSE)
        point = one.clone().requires_grad_()
        outputs = torch.func.functional_call(
            shop.learner.eval_model, shop.learner.theta_layout.unflatten(point), x[at]
        )
        (slope,) = torch.autograd.grad(F.mse_loss(outputs, target[at]), point)
        torch.testing.assert_close(slopes[at], slope, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("room", [1, 4, 6, 7, 13, 18, 47, 48, 1000])
def test_any_room_gives_the_same(shop, monkeypatch, room):
    shares, theta, buffers = some_models(shop)
    calls = crowded(monkeypatch, room)
    shop.room = room
    said = shop.mixture(shares, theta, buffers)
    assert shop.room == room  # nothing failed
    assert sum(models * inputs for models, inputs in calls) == MODELS * len(shop.unlabelled)
    torch.testing.assert_close(said, one_by_one(shop, shares, theta), rtol=0, atol=CLOSE)


def test_pieces_have_one_size(shop, monkeypatch):
    calls = crowded(monkeypatch, 1000)
    shop.room = 7 * MODELS  # eight inputs: four and four, not seven and one
    shop.mixture(*some_models(shop))
    assert calls == [(MODELS, 4)] * 2


@pytest.mark.parametrize("most", [1, 2, 5, 6, 12, 40])
def test_too_little_memory_halves_what_is_tried(shop, monkeypatch, most):
    shares, theta, buffers = some_models(shop)
    calls = crowded(monkeypatch, most)
    said = shop.mixture(shares, theta, buffers)
    torch.testing.assert_close(said, one_by_one(shop, shares, theta), rtol=0, atol=CLOSE)
    assert shop.room <= max(most, 1)
    assert calls[0] == (MODELS, 8)
    calls.clear()
    shop.mixture(shares, theta, buffers)
    assert max(models * inputs for models, inputs in calls) <= most  # it does not run into it again


def test_memory_that_runs_out_in_the_middle(shop, monkeypatch):
    shares, theta, buffers = some_models(shop)
    real, calls = ServerContext.outputs, []

    def outputs(self, theta, buffers, x):
        calls.append((len(theta), len(x)))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, theta, buffers, x)

    monkeypatch.setattr(ServerContext, "outputs", outputs)
    shop.room = 4 * MODELS
    said = shop.mixture(shares, theta, buffers)
    assert calls == [(MODELS, 4), (MODELS, 4), (MODELS, 2), (MODELS, 2)]
    torch.testing.assert_close(said, one_by_one(shop, shares, theta), rtol=0, atol=CLOSE)


def test_one_model_that_does_not_fit_is_said(shop, monkeypatch):
    crowded(monkeypatch, 0)
    with pytest.raises(InputError, match="do not fit into the memory of cpu"):
        shop.mixture(*some_models(shop))


def test_no_inputs_are_said(shop):
    with pytest.raises(InputError, match="x_server"):
        ServerContext(shop.learner, shop.examples).mixture(*some_models(shop))


def test_fedbe_is_the_same_with_little_memory(monkeypatch):
    method = FedBE(samples=3, server_epochs=2, server_batch=3)
    plain = train(small_federation(method, "loop", 2, 2), 2)
    calls = crowded(monkeypatch, 5)
    tight = train(small_federation(method, "loop", 2, 2), 2)
    assert max(models for models, _ in calls) > 5
    torch.testing.assert_close(
        tight.state.modes["theta"], plain.state.modes["theta"], rtol=0, atol=CLOSE
    )


def test_regression_mixes_outputs():
    data = FederatedData.from_arrays(
        numbers(6, 2), numbers(6, 1, word=1), [3, 3], x_server=numbers(8, 2, word=2)
    )
    made = Federation(
        lambda: nn.Linear(2, 1), data, FedBE(), loss="mse", modes=1, dtype=torch.float64
    )
    shop = made.algorithm.workshop
    shares, theta, buffers = some_models(shop)
    torch.testing.assert_close(
        shop.mixture(shares, theta, buffers), one_by_one(shop, shares, theta), rtol=0, atol=CLOSE
    )


def test_recorded_fedbe_is_the_same():
    """With a recorder that computes through buffers of its own: what it is given must all go
    through them.
    """
    recorded = []

    def record(function, given):
        held = [v.clone() if isinstance(v, torch.Tensor) else v for v in given]
        recorded.append(given)

        def replay(*given):
            for mine, value in zip(held, given, strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(value)
            return function(*held)

        return replay

    method = FedBE(samples=3, server_epochs=2, server_batch=3)
    plain = train(small_federation(method, "loop", 2, 2), 4)
    federation = small_federation(method, "loop", 2, 2)
    shop = federation.algorithm.workshop
    shop.outputs_of.record = shop.gradient_of.record = record
    train(federation, 4)
    # All outputs at once, gradients of whole batches and of the last one; idle modes are left out,
    # so that each of them is captured for one trained mode and for two.
    assert len(recorded) == 6
    assert torch.equal(federation.state.modes["theta"], plain.state.modes["theta"])


def test_what_cannot_be_recorded_is_said_and_runs_as_it_is():
    def record(function, given):
        raise RuntimeError("no graph of this\nwith a long explanation")

    method = FedBE(samples=3, server_epochs=2, server_batch=3)
    plain = train(small_federation(method, "loop", 2, 2), 2)
    federation = small_federation(method, "loop", 2, 2)
    shop = federation.algorithm.workshop
    shop.outputs_of.record = shop.gradient_of.record = record
    assert run_notes(federation) == []
    train(federation, 2)
    assert run_notes(federation) == ["The server's work runs without CUDA graphs: no graph of this"]
    assert torch.equal(federation.state.modes["theta"], plain.state.modes["theta"])
