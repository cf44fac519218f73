"""What is recorded of local training is what it does step by step; a recorder that records nothing
shows it.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedensemble import FederatedData, Federation
from fedensemble.algorithms import FedAvg, FedProx
from fedensemble.core.optimizer import SGD
from fedensemble.engines.local import captured_training
from fedensemble.engines.local.run_accumulator import RunAccumulator


class Silent(captured_training.GraphRecorder):
    """Lets the work be done once, at once."""

    def begin(self, repeated):
        pass

    def end(self):
        pass


@dataclass(frozen=True, kw_only=True)
class LooksBack(FedAvg):
    """Hands the old point on under another name."""

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
class Signs(SGD):
    """Steps in its own way."""

    def step(self, theta, gradient, slots, lr):
        return theta - lr * torch.sign(gradient), slots


@dataclass(frozen=True, kw_only=True)
class Directions(FedAvg):
    """Divides by the gradient's length, which is 0 for whoever is done."""

    def local_training(self, sent, memory, problem):
        def direction(theta, gradient):
            return gradient / gradient.norm(dim=-1, keepdim=True)

        return {"theta": problem.descend(sent["theta"], direction)}, memory


@pytest.mark.parametrize(
    "method", [FedAvg(), Directions(), FedAvg(optimizer=SGD(weight_decay=0.1))]
)
def test_whoever_is_done_stands_still(monkeypatch, method):
    monkeypatch.setattr(captured_training, "GraphRecorder", Silent)
    engine, inputs = block(method)
    second = inputs._replace(batch_index=inputs.batch_index[1:2], weight=inputs.weight[1:2])
    assert second.weight[0].any(-1).tolist() == [False, True, True]
    expected = engine.train_plainly(method, second, ragged=True)
    recorded = captured_training.CapturedTraining(
        method,
        second,
        1,
        lambda one: engine._make_minibatches(one, True),
        engine._make_cast_copy,
        None,
    )
    torch.testing.assert_close(
        recorded.uploads["theta"], expected.uploads["theta"], rtol=0, atol=1e-12
    )
    assert torch.equal(recorded.uploads["theta"][0], inputs.sent["theta"][0])
    assert not torch.equal(recorded.uploads["theta"][1], inputs.sent["theta"][0])


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
    return federation.engine, RunAccumulator(federation.engine, federation.ask()).prepare_block(
        torch.arange(3)
    ).inputs


@pytest.mark.parametrize(
    "method",
    [
        FedAvg(),
        FedAvg(optimizer=SGD(weight_decay=0.1)),
        FedAvg(optimizer=SGD(weight_decay=0.1, clip=0.01)),
        FedAvg(optimizer=Signs()),
        FedProx(mu=2.0),
        LooksBack(),
    ],
)
def test_one_recorded_step_is_one_step(monkeypatch, method):
    monkeypatch.setattr(captured_training, "GraphRecorder", Silent)
    engine, inputs = block(method, steps=1)
    expected = engine.train_plainly(method, inputs, ragged=False)
    recorded = captured_training.CapturedTraining(
        method,
        inputs,
        1,
        lambda one: engine._make_minibatches(one, False),
        engine._make_cast_copy,
        None,
    )
    torch.testing.assert_close(
        recorded.uploads["theta"], expected.uploads["theta"], rtol=0, atol=1e-12
    )
    assert not torch.allclose(expected.uploads["theta"], inputs.sent["theta"])
