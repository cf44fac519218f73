"""Captured local training computes the same as local training step by step.

The tests need no GPU: their recorder captures nothing, so that the work is done once, immediately.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedensemble import FederatedData, Federation
from fedensemble.algorithms import FedAvg, FedProx
from fedensemble.core.optimizer import SGD
from fedensemble.engines.local import cuda_graph_training
from fedensemble.engines.local.run_accumulator import RunAccumulator


class NoCapture(cuda_graph_training.GraphRecorder):
    """Captures nothing."""

    def begin(self, repeated):
        pass

    def end(self):
        pass


@dataclass(frozen=True, kw_only=True)
class ReturnsOldState(FedAvg):
    """Its step returns the old parameters under another name."""

    def local_training(self, sent, memory, problem):
        def step(state, gradient):
            theta = state["theta"]
            return {
                "theta": theta - problem.lr * gradient(theta),
                "before": theta,
                "part": theta[..., :1],
            }

        start = sent["theta"]
        last = problem.iterate(
            {"theta": start, "before": start + 1, "part": start[..., :1] + 1}, step
        )
        return {"theta": last["theta"] + 10 * last["before"] + 100 * last["part"]}, memory


@dataclass(frozen=True, kw_only=True)
class SignSGD(SGD):
    """A subclass of SGD with another step."""

    def step(self, theta, gradient, slots, lr):
        return theta - lr * torch.sign(gradient), slots


@dataclass(frozen=True, kw_only=True)
class NormalizedGradient(FedAvg):
    """Divides by the norm of the gradient, which is 0 for visits that have finished."""

    def local_training(self, sent, memory, problem):
        def direction(theta, gradient):
            return gradient / gradient.norm(dim=-1, keepdim=True)

        return {"theta": problem.descend(sent["theta"], direction)}, memory


@pytest.mark.parametrize(
    "method", [FedAvg(), NormalizedGradient(), FedAvg(optimizer=SGD(weight_decay=0.1))]
)
def test_visits_that_have_finished_do_not_change(monkeypatch, method):
    monkeypatch.setattr(cuda_graph_training, "GraphRecorder", NoCapture)
    engine, inputs = block(method)
    second = inputs._replace(batch_index=inputs.batch_index[1:2], weight=inputs.weight[1:2])
    assert second.weight[0].any(-1).tolist() == [False, True, True]
    expected = engine.train_eager(method, second, ragged=True)
    captured = cuda_graph_training.CapturedTraining(
        method,
        second,
        1,
        lambda one: engine._make_minibatches(one, True),
        engine._make_cast_copy,
        None,
    )
    torch.testing.assert_close(
        captured.uploads["theta"], expected.uploads["theta"], rtol=0, atol=1e-12
    )
    assert torch.equal(captured.uploads["theta"][0], inputs.sent["theta"][0])
    assert not torch.equal(captured.uploads["theta"][1], inputs.sent["theta"][0])


def block(method, **work):
    """An engine, and a block of three clients of different sizes."""
    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(n, 3, generator=generator).tolist(), [0, 1] * (n // 2)) for n in (4, 6, 8)
    ]
    federation = Federation(
        lambda: nn.Linear(3, 2),
        FederatedData.from_clients(clients),
        method,
        modes=1,
        batch_size=4,
        dtype=torch.float64,
        **work,
    )
    return federation.engine, RunAccumulator(
        federation.engine, federation.next_request()
    ).prepare_block(torch.arange(3)).inputs


@pytest.mark.parametrize(
    "method",
    [
        FedAvg(),
        FedAvg(optimizer=SGD(weight_decay=0.1)),
        FedAvg(optimizer=SGD(weight_decay=0.1, clip=0.01)),
        FedAvg(optimizer=SignSGD()),
        FedProx(mu=2.0),
        ReturnsOldState(),
    ],
)
def test_one_captured_step_equals_one_step(monkeypatch, method):
    monkeypatch.setattr(cuda_graph_training, "GraphRecorder", NoCapture)
    engine, inputs = block(method, steps=1)
    expected = engine.train_eager(method, inputs, ragged=False)
    captured = cuda_graph_training.CapturedTraining(
        method,
        inputs,
        1,
        lambda one: engine._make_minibatches(one, False),
        engine._make_cast_copy,
        None,
    )
    torch.testing.assert_close(
        captured.uploads["theta"], expected.uploads["theta"], rtol=0, atol=1e-12
    )
    assert not torch.allclose(expected.uploads["theta"], inputs.sent["theta"])
