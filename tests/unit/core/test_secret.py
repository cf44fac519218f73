"""Secret random values: from the system on real clients, reproducible in simulations."""

from dataclasses import dataclass, replace

import pytest
import torch

from fedensemble import FedAvg
from fedensemble.core.secret import system_uniform
from fedensemble.core.visits.batches import LocalWork
from fedensemble.testing import check_algorithm
from fedensemble.testing.assertions import require_close
from fedensemble.testing.toy_problems import quadratic_problem, small_federation, train


@dataclass(frozen=True, kw_only=True)
class Noisy(FedAvg):
    """FedAvg whose clients add noise to their uploads."""

    scale: float = 0.1

    def local_training(self, sent, memory, problem):
        uploads, memory = super().local_training(sent, memory, problem)
        theta = uploads["theta"]
        noise = (
            problem.secret_normal(theta) + problem.secret_uniform(theta) - problem.uniform(theta)
        )
        return {"theta": theta + self.scale * noise}, memory


def test_engines_agree_and_runs_can_be_repeated():
    loop, vector, again, plain = (
        train(small_federation(method, engine, 2, 2), 3)
        for method, engine in (
            (Noisy(), "loop"),
            (Noisy(), "vector"),
            (Noisy(), "vector"),
            (FedAvg(), "vector"),
        )
    )
    require_close(vector.tensors(), loop.tensors(), "loop and vector")
    assert torch.equal(vector.state.modes["theta"], again.state.modes["theta"])
    assert float((vector.state.modes["theta"] - plain.state.modes["theta"]).abs().max()) > 0.01


def test_an_algorithm_with_secret_noise_keeps_the_contract():
    check_algorithm(Noisy(lr=0.1), "vector")


@pytest.mark.parametrize("visits", [3, 1])
def test_simulated_values_differ_by_call_visit_and_kind(visits):
    problem = quadratic_problem(FedAvg(), visits, 5)
    like = torch.zeros(visits, 500, dtype=torch.float64)
    drawn = torch.cat(
        [problem.secret_uniform(like), problem.secret_uniform(like), problem.uniform(like)]
    )
    assert len(torch.unique(drawn)) == drawn.numel()
    assert float(drawn.min()) > 0
    assert float(drawn.max()) < 1
    noise = problem.secret_normal(torch.zeros(visits, 20_000, dtype=torch.float64))
    assert float(noise.mean().abs()) < 0.03
    assert float((noise.std() - 1).abs()) < 0.03


def test_values_of_the_operating_system():
    drawn = system_uniform(40_000)
    assert drawn.dtype == torch.float64
    assert len(torch.unique(drawn)) == len(drawn)
    assert 0 < float(drawn.min()) < 0.01
    assert 0.99 < float(drawn.max()) < 1
    assert abs(float(drawn.mean()) - 0.5) < 0.01
    assert len(system_uniform(0)) == 0


def visits_of_a_client(algorithm):
    """The uploads of two identical visits of one Flower client."""
    pytest.importorskip("flwr")
    from fedensemble.engines.flower.client import LocalClient
    from fedensemble.engines.flower.messages import Visit

    federation = small_federation(algorithm, "loop", 2, 2)
    data = federation.data
    own = replace(
        data,
        x=data.x[: data.size[0]],
        y=data.y[: data.size[0]],
        start=data.start[:1],
        size=data.size[:1],
    )
    client = LocalClient(
        federation.model, algorithm, own, LocalWork(epochs=1, batch_size=2), seed=3
    )
    fields = dict.fromkeys(Visit._fields, 0)
    visit = Visit(**{**fields, "training": "t", "counted": -1, "largest": 2})
    theta, buffers = federation.state.modes["theta"][0], torch.empty(0, dtype=torch.float64)
    return [
        client.run_visit(visit, {"theta": theta}, buffers, None)[1].uploads["theta"]
        for _ in range(2)
    ]


def test_identical_visits_of_a_real_client_have_different_secrets():
    first, second = visits_of_a_client(Noisy())
    assert float((first - second).abs().min()) > 0


@dataclass(frozen=True, kw_only=True)
class Public(FedAvg):
    def local_training(self, sent, memory, problem):
        uploads, memory = super().local_training(sent, memory, problem)
        return {"theta": uploads["theta"] + problem.uniform(sent["theta"])}, memory


def test_public_values_of_a_real_client_stay_the_same():
    first, second = visits_of_a_client(Public())
    assert torch.equal(first, second)
