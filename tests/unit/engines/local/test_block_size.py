"""A block stays within its memory budget, also on a CPU, and estimating it has no side effects."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedensemble import EngineWarning, FedAvg, FederatedData, Federation, InputError
from fedensemble.data import load, partition
from fedensemble.engines.local import block_size
from fedensemble.runtime.oom import format_gib
from fedensemble.testing.assertions import require_close
from fedensemble.testing.toy_problems import small_federation, train

WIDTH, INPUTS, CLASSES, BATCH = 1000, 4, 3, 16
ONE = BATCH * WIDTH * 8  # bytes of a batch's activations in one layer
GIB = 1 << 30
NOT_STACKABLE = pytest.mark.filterwarnings("ignore::fedensemble.errors.EngineWarning")


class Wide(nn.Module):
    """Few weights, and `layers` wide layers without weights that save their output."""

    def __init__(self, layers=20, fixed=None):
        super().__init__()
        self.scale, self.out, self.layers = nn.Linear(INPUTS, 1), nn.Linear(WIDTH, CLASSES), layers
        self.fixed, self.calls = fixed, 0

    def forward(self, x):
        self.calls += 1
        if self.fixed is not None and self.training and len(x) % self.fixed:
            raise ValueError(f"the batch size must be {self.fixed}")
        h = self.scale(x).expand(-1, WIDTH)
        for _ in range(self.layers):
            h = torch.tanh(h)
        return self.out(h)


class NotStackable(Wide):
    """Writes to a copy of a parameter, so that only vmap can batch it."""

    def forward(self, x):
        return super().forward(x * self.out.weight.clone().mul_(2.0).mean())


def data(clients=4, batch=BATCH):
    x = torch.randn(clients * batch, INPUTS, generator=torch.Generator().manual_seed(0))
    return FederatedData.from_arrays(
        x, torch.arange(len(x)) % CLASSES, [batch] * clients, classes=CLASSES
    )


def made(model=Wide, batch=BATCH, clients=4, **options):
    return Federation(
        model,
        data(clients),
        FedAvg(lr=0.1),
        modes=1,
        batch_size=batch,
        dtype=torch.float64,
        engine_options=options,
    )


@NOT_STACKABLE
@pytest.mark.parametrize("model", [Wide, NotStackable])
def test_saved_tensors_are_counted_once(model):
    federation = made(model)
    assert federation.engine.stacked == (model is Wide)
    needed = block_size.activations(federation.engine)
    # 20 layers and the live gradients. "out" saves the output of the last layer, which is counted
    # already.
    assert 20 * ONE <= needed <= (20 + block_size._LIVE_GRADS + 1.5) * ONE


@NOT_STACKABLE
@pytest.mark.parametrize("model", [Wide, NotStackable])
def test_the_estimate_from_few_examples_holds_for_a_batch(model):
    engine = made(model).engine
    gradient = engine.gradient if engine.stacked else engine.model.gradient_function(batched=False)
    whole = block_size._saved_bytes(engine, gradient, BATCH)
    assert block_size.activations(engine) == pytest.approx(whole, rel=0.01)


def test_the_budget_bounds_a_block_and_does_not_change_results():
    budget = 8 * 20 * ONE
    few, many = made(clients=12, memory=budget / GIB), made(clients=12)
    assert 4 <= few.engine.block <= 8
    assert many.engine.block == 64
    require_close(train(few, 2).tensors(), train(many, 2).tensors(), "A smaller budget")


PEAKS = """
import torch
from torch import nn
from fedensemble import FedAvg, FederatedData, Federation
from fedensemble.bench.timing import resident_bytes

def model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))

x, y = torch.randn(160, 3, 64, 64), torch.arange(160) % 3
data = FederatedData.from_arrays(x, y, [4] * 40, classes=3)
for memory in (0.03, None):
    options = {"memory": memory}
    made = Federation(model, data, FedAvg(lr=0.1), modes=1, batch_size=4, engine_options=options)
    before = resident_bytes(peak=True)
    list(made.rounds(1))
    print((resident_bytes(peak=True) - before) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is exact on Linux only")
def test_the_budget_is_kept():
    """In a process of its own, because the peak memory of a process never decreases."""
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # each thread allocates its own memory
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    little, much = map(int, done.stdout.split())  # MiB
    assert little < 40
    assert much > 60  # without the budget it takes more


def test_a_batch_of_one():
    assert block_size.activations(made(batch=1).engine) < 2 * ONE * 20 / BATCH


def test_a_model_that_accepts_one_batch_size_only(monkeypatch):
    sizes, real = [], block_size._saved_bytes

    def saved(engine, gradient, batch):
        sizes.append(batch)
        return real(engine, gradient, batch)

    monkeypatch.setattr(block_size, "_saved_bytes", saved)
    federation = made(lambda: Wide(fixed=BATCH))
    assert sizes == [block_size._FEW, BATCH]
    assert next(federation.rounds(1)).round == 1


def test_the_estimate_does_not_call_the_module_itself():
    assert made().model.training_model.calls == 0


def test_no_estimate_where_it_does_not_matter(monkeypatch):
    def fail(engine):
        raise AssertionError("the estimate is not needed")

    monkeypatch.setattr(block_size, "activations", fail)
    assert made(block=3).engine.block == 3
    with pytest.warns(EngineWarning):
        assert made(memory=1e-6).engine.block == 1  # the parameters alone exceed it


def test_a_budget_for_less_than_a_visit_warns():
    one = block_size._COPIES * made().model.theta_layout.total * 8 + block_size.activations(
        made().engine
    )
    needed, budget = format_gib(one), format_gib(0.9 * one)
    message = f"One visit needs about {needed}, more than the memory budget of {budget}: visits are"
    with pytest.warns(EngineWarning, match=message):
        assert made(memory=0.9 * one / GIB).engine.block == 1
    federation = made(memory=1.1 * one / GIB)  # one visit fits: no warning
    assert federation.engine.block == 1
    assert federation.engine.notes == []


def test_one_visit_that_does_not_fit_raises_at_the_start(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    monkeypatch.setattr(block_size, "_saved_bytes", full)
    message = (
        r"One visit does not fit into the memory of cpu \(3.0 GiB requested, "
        r".*lower batch_size"
    )
    with pytest.raises(InputError, match=message):
        small_federation(FedAvg(), "vector", 2, 2)


@pytest.mark.parametrize("most", [2, 1, 0])
def test_a_gpu_is_measured_with_two_visits_and_then_with_one(monkeypatch, most):
    tried = []

    def measure(engine, visits):
        tried.append(visits)
        if visits > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 100

    monkeypatch.setattr(block_size, "_measure", measure)
    model = SimpleNamespace(device=torch.device("cuda"), factory=None)
    engine = SimpleNamespace(model=model, data=None)
    if most:
        assert block_size.activations(engine) == 100
    else:
        with pytest.raises(InputError, match="One visit does not fit into the memory of cuda"):
            block_size.activations(engine)
    assert tried == [2, 1][: 3 - max(most, 1)]


class Forces(nn.Module):
    """Takes gradients in its forward pass, where torch forbids saved-tensor hooks."""

    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, CLASSES)

    def forward(self, x):
        return self.out(
            torch.func.vmap(torch.func.grad(lambda one: self.inside(one).tanh().sum()))(x)
        )


@NOT_STACKABLE
def test_a_model_that_takes_gradients_itself():
    got, expected = (
        Federation(
            Forces,
            data(),
            FedAvg(lr=0.1),
            modes=2,
            batch_size=BATCH,
            engine=engine,
            dtype=torch.float64,
        )
        for engine in ("vector", "loop")
    )
    list(got.rounds(2))
    list(expected.rounds(2))
    require_close(got.state.modes, expected.state.modes, "Engines disagree")


def test_a_built_in_model_is_estimated_once(monkeypatch):
    calls, original = [], block_size._saved_bytes

    def counted(engine, gradient, batch):
        calls.append(batch)
        return original(engine, gradient, batch)

    monkeypatch.setattr(block_size, "_saved_bytes", counted)
    monkeypatch.setattr(block_size, "_ACTIVATIONS", {})

    def activations(**options):
        data = partition(load("digits"), "iid", clients=4)
        settings = {"modes": 1, "batch_size": 8, "model": "mlp", **options}
        return Federation(settings.pop("model"), data, **settings).engine.activation_bytes

    first = activations()
    assert activations(seed=1) == first and len(calls) == 2
    assert activations(batch_size=16) > first and len(calls) == 4
    assert activations(model={"name": "mlp", "hidden": [300]}) > first and len(calls) == 6
    assert activations(dtype=torch.float64) > first and len(calls) == 8
