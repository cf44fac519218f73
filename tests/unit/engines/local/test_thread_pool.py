"""Parts of a block in threads: the same results, and process-wide settings are restored."""

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from time import sleep

import pytest
import torch
from torch import nn

from fedensemble import EngineWarning, FedAvg, FederatedData, Federation
from fedensemble.algorithms import Scaffold
from fedensemble.engines.local import thread_pool
from fedensemble.engines.local.block import gather_sent
from fedensemble.engines.local.flops import count_flops
from fedensemble.engines.local.vector import VectorEngine
from fedensemble.errors import DivergedError
from fedensemble.modeling.factory import SeededFactory
from fedensemble.testing.assertions import AGREEMENT
from fedensemble.testing.cases import CASES
from fedensemble.testing.engine import check_case
from fedensemble.testing.toy_problems import small_federation, train

SIZES = (7, 3, 12, 5, 9, 1, 8)


class Net(nn.Module):
    """Everything that threads could mix up: dropout, running statistics, attention."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.look, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        x = self.drop(torch.relu(self.norm(self.first(x)))).flatten(2).transpose(1, 2)
        return self.out((x + nn.functional.scaled_dot_product_attention(x, x, x)).mean(1))


@pytest.fixture(autouse=True)
def several_cores(monkeypatch):
    """Three cores, whatever the machine has, and threads for every model."""
    monkeypatch.setattr(thread_pool, "_WORTH", 0)
    monkeypatch.setattr(thread_pool, "available_threads", lambda: 3)


def images(sizes=SIZES):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 1, 6, 6, generator=generator, dtype=torch.float64)
    return FederatedData.from_arrays(
        x, torch.randint(0, 3, (len(x),), generator=generator), sizes, classes=3
    )


def federation(algorithm=None, **options):
    return Federation(
        Net,
        images(),
        algorithm or FedAvg(lr=0.1),
        modes=2,
        strata=2,
        batch_size=4,
        dtype=torch.float64,
        **options,
    )


def used(federation):
    return federation.engine.threads._pool is not None


@pytest.mark.parametrize("algorithm", [FedAvg(lr=0.1), Scaffold(lr=0.1)])
def test_equals_one_thread_up_to_rounding_and_is_reproducible_bit_for_bit(algorithm, monkeypatch):
    first, again = (train(federation(algorithm), 4) for _ in range(2))
    assert used(first)
    monkeypatch.setattr(thread_pool, "available_threads", lambda: 1)
    alone = train(federation(algorithm), 4)
    assert not used(alone)
    for name, value in first.tensors().items():
        assert torch.equal(value, again.tensors()[name]), name
        torch.testing.assert_close(value, alone.tensors()[name], rtol=AGREEMENT, atol=AGREEMENT)


def test_equals_training_the_parts_one_after_another(monkeypatch):
    """The order in which threads finish does not change the result."""

    class InOrder:
        def __init__(self, *args, **options):
            pass

        def submit(self, function, part):
            done = Future()
            done.set_result(function(part))
            return done

    side_by_side = train(federation(), 3).tensors()
    monkeypatch.setattr(thread_pool, "ThreadPoolExecutor", InOrder)
    one_by_one = train(federation(), 3).tensors()
    assert all(torch.equal(side_by_side[name], value) for name, value in one_by_one.items())


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_contract(case):
    check_case("vector", case, {})


def test_settings_are_restored():
    from torch.backends import cuda

    def flags():
        return torch.get_num_threads(), cuda.math_sdp_enabled(), cuda.flash_sdp_enabled()

    before = flags()
    made = train(federation(), 2)
    assert used(made)
    assert flags() == before


def test_a_failing_part_raises_and_the_next_round_works():
    made = federation(Scaffold(lr=0.1))
    before = made.tensors()["modes/theta"].clone()
    object.__setattr__(made.algorithm, "lr", float("inf"))
    with pytest.raises(DivergedError, match="round 1, client"):
        next(made.rounds(1))
    assert torch.equal(made.tensors()["modes/theta"], before)
    object.__setattr__(made.algorithm, "lr", 0.1)
    assert next(made.rounds(1)).round == 1


def test_small_models_stay_in_one_thread(monkeypatch):
    monkeypatch.setattr(thread_pool, "_WORTH", 10_000_000)
    made = train(small_federation(FedAvg(lr=0.1), "vector", 2, 2), 1)
    assert made.engine.threads.work < 10_000_000
    assert not used(made)


def test_flops_of_a_forward_pass():
    data = FederatedData.from_arrays(
        torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64), [2, 2], classes=3
    )
    made = Federation(lambda: nn.Linear(5, 3), data, modes=1)
    assert count_flops(made.engine) == 2 * 5 * 3


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_cover_the_block(count):
    made = federation()
    request = made.next_request()
    plan = request.plan
    inputs = made.engine.prepare(
        made.algorithm, request.sent, plan.mode, request.buffers[plan.mode], plan, 0
    )
    parts = thread_pool.split_inputs(inputs, count)
    assert torch.equal(torch.cat([part.model_key for part in parts]), inputs.model_key)
    sent = torch.cat([gather_sent(part)["theta"] for part in parts])
    assert torch.equal(sent, request.sent["theta"][plan.mode])
    for part in parts:
        assert len(part.batch_index) == len(part.weight) == int(part.counts.max())


@pytest.mark.parametrize(("enough", "expected"), [(10**9, 1), (1, 3)])
def test_threads_inside_operations_only_for_large_blocks(enough, expected, monkeypatch):
    monkeypatch.setattr(thread_pool, "_WORTH", 10**12)
    monkeypatch.setattr(thread_pool, "_WORTH_INSIDE", enough)
    seen = set()

    class Spy(nn.Linear):
        def forward(self, x):
            if self.training:
                seen.add(torch.get_num_threads())
            return super().forward(x)

    data = FederatedData.from_arrays(
        torch.randn(20, 4), torch.randint(0, 3, (20,)), (10, 10), classes=3
    )
    made = Federation(lambda: Spy(4, 3), data, FedAvg(), batch_size=4)
    before = torch.get_num_threads()
    seen.clear()
    train(made, 2)
    assert seen == {expected}
    assert torch.get_num_threads() == before


def test_no_part_is_still_running_when_the_block_is_retried(monkeypatch):
    usual, lock, running, most = VectorEngine.train_eager, Lock(), [], []

    def train_eager(self, *arguments):
        with lock:
            running.append(self)
            most.append(len(running))
            first = len(most) == 1
        try:
            if first:
                raise MemoryError("std::bad_alloc")
            sleep(0.2)
            return usual(self, *arguments)
        finally:
            with lock:
                running.remove(self)

    monkeypatch.setattr(VectorEngine, "train_eager", train_eager)
    with pytest.warns(EngineWarning, match="Out of memory in round 1"):
        made = train(federation(), 1)
    assert max(most) <= 3
    assert len(made.engine.threads._idle) == 3


def test_models_made_in_threads_have_the_same_initial_parameters():
    """Factories draw from torch's global generator, which all threads share."""
    maker = SeededFactory(
        lambda: nn.Sequential(*(nn.Linear(40, 40) for _ in range(20))), torch.float32
    )

    def start(seed):
        return torch.cat([p.detach().flatten() for p in maker(seed).parameters()])

    alone = [start(seed) for seed in range(8)]
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(start, range(8)), alone))
    assert torch.equal(torch.get_rng_state(), before)


def test_one_core_trains_parts_with_as_many_steps_as_they_need(monkeypatch):
    monkeypatch.setattr(thread_pool, "available_threads", lambda: 1)
    one = federation()
    steps, train_eager = [], one.engine.train_eager
    one.engine.train_eager = lambda algorithm, inputs, ragged: (
        steps.append(len(inputs.batch_index)),
        train_eager(algorithm, inputs, ragged),
    )[1]
    one.run_round()
    assert len(steps) == 4 and steps == sorted(steps, reverse=True) and steps[0] > steps[-1]
