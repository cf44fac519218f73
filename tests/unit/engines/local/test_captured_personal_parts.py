"""Personal parts in the code that is captured as CUDA graphs, run once on the CPU."""

import pytest
import torch

from fedensemble.algorithms import FedAc, FedAvg, Scaffold
from fedensemble.engines.local import cuda_graph_training
from fedensemble.engines.local.block import Minibatches
from fedensemble.testing.toy_problems import small_federation


class NoGraphs:
    """Captures nothing, so that each graph runs once, when it would be captured."""

    def __init__(self, pool):
        self.graphs = []

    def begin(self, repeated):
        pass

    def end(self):
        pass


MOMENTUM = FedAvg(lr=0.1, optimizer={"name": "sgd", "momentum": 0.9})


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("algorithm", [FedAvg(), MOMENTUM, Scaffold(), FedAc()], ids=repr)
def test_one_captured_step_is_one_step(algorithm, alternate, monkeypatch):
    monkeypatch.setattr(cuda_graph_training, "GraphRecorder", NoGraphs)
    options = {"personal": ["2.*"], "alternate": alternate, "steps": 1}
    made = small_federation(algorithm, "vector", 2, 2, **options)
    request, engine = made.next_request(), made.engine
    method, plan = request.algorithm, request.plan
    buffers = request.buffers[plan.mode]
    inputs = engine.prepare(method, request.sent, plan.mode, buffers, plan, 0)
    expected = engine.train_eager(method, inputs, ragged=False)
    captured = cuda_graph_training.CapturedTraining(
        method,
        inputs,
        1,
        lambda own: Minibatches(engine.data, engine.model.dtype, engine.gradient, own, False),
        lambda theta: None,
        None,
    )
    for ours, theirs in (
        (captured.uploads, expected.uploads),
        (captured.memory, expected.memory),
    ):
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value)
