"""The server evaluates many models in one pass as it does one by one, however little fits."""

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
def context():
    return small_federation(FedBE(), "loop", 2, 2).algorithm.context


def some_models(context):
    """Weights of two mixtures, parameters and (empty) buffers."""
    theta = 0.5 * numbers(MODELS, context.model.theta_layout.total)
    weights = numbers(2, MODELS, word=1).softmax(-1)
    return weights, theta, theta[:, :0]


def one_by_one(context, weights, theta):
    """The mixtures of predictions, one model at a time."""
    outputs = [context.model.outputs(one, theta[0, :0], context.unlabelled) for one in theta]
    predictions = torch.stack(outputs)
    if context.model.task == "classification":
        predictions = predictions.softmax(-1)
    return torch.einsum("km,mnc->knc", weights, predictions)


def limit_memory(monkeypatch, most):
    """Makes calls with more than `most` models times inputs fail; returns all calls' sizes."""
    calls, real = [], ServerContext.outputs

    def outputs(self, theta, buffers, x):
        calls.append((len(theta), len(x)))
        if len(theta) * len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, theta, buffers, x)

    monkeypatch.setattr(ServerContext, "outputs", outputs)
    return calls


def test_on_a_cpu_nothing_is_captured(context):
    _, theta, buffers = some_models(context)
    for _ in range(3):
        context.outputs(theta, buffers, context.unlabelled)
    assert context.graphed_outputs.capture is None
    assert context.graphed_gradient.capture is None
    assert not context.graphed_outputs.cache


def test_outputs_and_gradients_equal_those_of_single_models(context):
    _, theta, buffers = some_models(context)
    together = context.outputs(theta, buffers, context.unlabelled)
    target = numbers(*together.shape, word=2)
    x = numbers(MODELS, *context.unlabelled.shape, word=3)
    gradients = context.gradient(F.mse_loss, theta, buffers, x, target)
    for at, one in enumerate(theta):
        alone = context.model.outputs(one, buffers[at], context.unlabelled)
        torch.testing.assert_close(together[at], alone, rtol=0, atol=CLOSE)
        point = one.clone().requires_grad_()
        outputs = torch.func.functional_call(
            context.model.eval_model, context.model.theta_layout.unflatten(point), x[at]
        )
        (gradient,) = torch.autograd.grad(F.mse_loss(outputs, target[at]), point)
        torch.testing.assert_close(gradients[at], gradient, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("chunk_size", [1, 4, 6, 7, 13, 18, 47, 48, 1000])
def test_the_chunk_size_does_not_change_the_result(context, monkeypatch, chunk_size):
    weights, theta, buffers = some_models(context)
    calls = limit_memory(monkeypatch, chunk_size)
    context.chunk_size = chunk_size
    mixtures = context.mixture_of_predictions(weights, theta, buffers)
    assert context.chunk_size == chunk_size  # nothing failed
    assert sum(models * inputs for models, inputs in calls) == MODELS * len(context.unlabelled)
    torch.testing.assert_close(mixtures, one_by_one(context, weights, theta), rtol=0, atol=CLOSE)


def test_chunks_have_equal_sizes(context, monkeypatch):
    calls = limit_memory(monkeypatch, 1000)
    context.chunk_size = 7 * MODELS  # eight inputs: four and four, not seven and one
    context.mixture_of_predictions(*some_models(context))
    assert calls == [(MODELS, 4)] * 2


@pytest.mark.parametrize("most", [1, 2, 5, 6, 12, 40])
def test_out_of_memory_halves_the_chunk_size(context, monkeypatch, most):
    weights, theta, buffers = some_models(context)
    calls = limit_memory(monkeypatch, most)
    mixtures = context.mixture_of_predictions(weights, theta, buffers)
    torch.testing.assert_close(mixtures, one_by_one(context, weights, theta), rtol=0, atol=CLOSE)
    assert context.chunk_size <= max(most, 1)
    assert calls[0] == (MODELS, 8)
    calls.clear()
    context.mixture_of_predictions(weights, theta, buffers)
    assert (
        max(models * inputs for models, inputs in calls) <= most
    )  # the smaller chunk size is kept


def test_out_of_memory_after_the_first_chunk(context, monkeypatch):
    weights, theta, buffers = some_models(context)
    real, calls = ServerContext.outputs, []

    def outputs(self, theta, buffers, x):
        calls.append((len(theta), len(x)))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, theta, buffers, x)

    monkeypatch.setattr(ServerContext, "outputs", outputs)
    context.chunk_size = 4 * MODELS
    mixtures = context.mixture_of_predictions(weights, theta, buffers)
    assert calls == [(MODELS, 4), (MODELS, 4), (MODELS, 2), (MODELS, 2)]
    torch.testing.assert_close(mixtures, one_by_one(context, weights, theta), rtol=0, atol=CLOSE)


def test_one_model_that_does_not_fit_raises(context, monkeypatch):
    limit_memory(monkeypatch, 0)
    with pytest.raises(InputError, match="do not fit into the memory of cpu"):
        context.mixture_of_predictions(*some_models(context))


def test_no_inputs_raise(context):
    with pytest.raises(InputError, match="x_server"):
        ServerContext(context.model, context.examples).mixture_of_predictions(*some_models(context))


def test_fedbe_gives_the_same_result_with_little_memory(monkeypatch):
    method = FedBE(samples=3, server_epochs=2, server_batch=3)
    plain = train(small_federation(method, "loop", 2, 2), 2)
    calls = limit_memory(monkeypatch, 5)
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
    context = made.algorithm.context
    weights, theta, buffers = some_models(context)
    torch.testing.assert_close(
        context.mixture_of_predictions(weights, theta, buffers),
        one_by_one(context, weights, theta),
        rtol=0,
        atol=CLOSE,
    )


def test_fedbe_gives_the_same_result_with_graphs():
    """With a fake capture that computes through buffers, as a graph does: an input that is not an
    argument would keep its old value.
    """
    captured = []

    def capture(function, args):
        buffers = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        captured.append(args)

        def replay(*args):
            for buffer, value in zip(buffers, args, strict=True):
                if isinstance(buffer, torch.Tensor):
                    buffer.copy_(value)
            return function(*buffers)

        return replay

    method = FedBE(samples=3, server_epochs=2, server_batch=3)
    plain = train(small_federation(method, "loop", 2, 2), 4)
    federation = small_federation(method, "loop", 2, 2)
    context = federation.algorithm.context
    context.graphed_outputs.capture = context.graphed_gradient.capture = capture
    train(federation, 4)
    # One or two modes were trained in a round, and for each of these numbers: all outputs;
    # gradients of full batches, and of the last one.
    assert len(captured) == 6
    assert torch.equal(federation.state.modes["theta"], plain.state.modes["theta"])


def test_a_failed_capture_is_noted_and_runs_eagerly():
    def capture(function, args):
        raise RuntimeError("no graph of this\nwith a long explanation")

    method = FedBE(samples=3, server_epochs=2, server_batch=3)
    plain = train(small_federation(method, "loop", 2, 2), 2)
    federation = small_federation(method, "loop", 2, 2)
    context = federation.algorithm.context
    context.graphed_outputs.capture = context.graphed_gradient.capture = capture
    assert run_notes(federation) == []
    train(federation, 2)
    assert run_notes(federation) == [
        "The server's computations run without CUDA graphs: no graph of this"
    ]
    assert torch.equal(federation.state.modes["theta"], plain.state.modes["theta"])
