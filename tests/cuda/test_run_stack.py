"""Runs that are stacked on a GPU give what each of them gives alone in a loop on the CPU."""

import warnings

import pytest
import torch

from fedensemble import Federation
from fedensemble.algorithms import FedAdam, FedAvg, FedProx, Scaffold
from fedensemble.data import load, partition
from fedensemble.experiment.studies.run_groups import Groups
from fedensemble.experiment.studies.run_stack import RunStack

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MAKE = {
    "fedavg": lambda lr: FedAvg(lr=lr, lr_decay=0.8, lr_decay_every=2),
    "fedprox": lambda lr: FedProx(lr=0.1, mu=lr),
    "scaffold": lambda lr: Scaffold(lr=lr),
    "fedadam": lambda lr: FedAdam(lr=0.05, server_lr=lr, tau=lr / 10),
}


def federations(name, data, engine, device, dtype=torch.float64, seeds=(0, 0, 3)):
    return [
        Federation(
            {"name": "mlp", "hidden": [8]},
            data,
            MAKE[name](lr),
            modes=3,
            strata=2,
            clients_per_round=4,
            batch_size=16,
            engine=engine,
            device=device,
            dtype=dtype,
            seed=seed,
        )
        for lr, seed in zip((0.02, 0.05, 0.1), seeds, strict=True)
    ]


@pytest.fixture(scope="module")
def data():
    return partition(load("digits"), "dirichlet", clients=12, alpha=0.5)


@pytest.mark.parametrize("name", MAKE)
def test_each_run_is_as_alone(data, name):
    alone = federations(name, data, "loop", "cpu")
    stack = RunStack(federations(name, data, "vector", "cuda"))
    for _ in range(6):
        reports = stack.train_round()
        expected = [federation.run_round() for federation in alone]
        for one, other in zip(reports, expected, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-9)
            assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)
    for one, other in zip(stack.federations, alone, strict=True):
        assert one.engine.notes == []
        for key, value in other.state.modes.items():
            torch.testing.assert_close(one.state.modes[key].cpu(), value, rtol=1e-8, atol=1e-10)
    assert stack.federations[0].engine._captured  # by CUDA graphs


def test_groups_train_stacks_and_leave_out_runs_that_are_done(data):
    runs = dict(enumerate(federations("fedavg", data, "vector", "cuda", seeds=(0, 1, 2))))
    alone = federations("fedavg", data, "loop", "cpu", seeds=(0, 1, 2))
    groups = Groups()
    for round in range(5):
        if round == 3:
            del runs[0]  # the first run trains the blocks of all
        outcomes = groups.advance(runs)
        assert all(report.round == round + 1 for _, report in outcomes)
        for index, _ in outcomes:
            alone[index].run_round()
    for index, federation in runs.items():
        theta = alone[index].state.modes["theta"]
        torch.testing.assert_close(federation.state.modes["theta"].cpu(), theta, rtol=0, atol=1e-9)


def test_preparing_a_round_does_not_wait_for_the_gpu(data):
    """Only reading the losses may: everything before is queued while the last kernels run."""
    stack = RunStack(federations("fedavg", data, "vector", "cuda", torch.float32))
    for _ in range(3):
        stack.train_round()
    torch.cuda.synchronize()
    waits = []
    original = torch.Tensor.cpu
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        torch.Tensor.cpu = lambda self: (
            waits.append(self.is_cuda),
            _allowing_sync(original, self),
        )[1]
        stack.train_round()
    finally:
        torch.Tensor.cpu = original
        torch.cuda.set_sync_debug_mode("default")
    assert waits.count(True) == 1


def _allowing_sync(function, tensor):
    torch.cuda.set_sync_debug_mode("default")
    try:
        return function(tensor)
    finally:
        torch.cuda.set_sync_debug_mode("error")
