"""Activation checkpointing: the results of a model that keeps its activations, on every engine."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import (
    EngineWarning,
    FedAvg,
    FederatedData,
    Federation,
    activation_checkpoint,
    prng,
)
from fedensemble.modeling.keyed_rng import KeyedRandomness, active_randomness
from fedensemble.testing.assertions import require_close

SIZES, WIDTH, LENGTH = (6, 4, 5), 4, 3


def keep(function, *args):
    return function(*args)


class Net(nn.Module):
    """A classifier of sequences whose hidden part is `part(self, x)`, by `run`."""

    def __init__(self, part, run):
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.group = nn.BatchNorm1d(LENGTH), nn.GroupNorm(1, LENGTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, WIDTH))
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 6, 0.2, batch_first=True)
        self.dropout, self.out = nn.Dropout(0.4), nn.Linear(WIDTH, 3)
        self.part, self.run, self.calls = part, run, 0

    def hidden(self, x):
        self.calls += 1
        return self.part(self, x)

    def forward(self, x):
        x = self.dropout(torch.tanh(self.first(x)))
        return self.out(self.dropout(self.run(self.hidden, x))).mean(1)


def nested(net, x):
    inner = net.run(lambda x: net.dropout(torch.tanh(net.inner(x))), torch.sigmoid(x))
    return net.norm(inner * 2).sin()


PARTS = {
    "linear": lambda net, x: torch.tanh(net.inner(x)),
    "dropout": lambda net, x: net.dropout(torch.tanh(net.inner(net.dropout(x)))),
    "running statistics": lambda net, x: torch.tanh(net.norm(net.inner(x))),
    "norms that could be fused": lambda net, x: F.relu(net.group(net.inner(x))),
    "a parameter outside of layers": lambda net, x: net.inner(x * net.scale).exp() + net.scale,
    "attention": lambda net, x: net.encoder(x),
    "nested": nested,
}


def trained(part, run, engine):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    data = FederatedData.from_arrays(x, torch.arange(len(x)) % 3, list(SIZES))
    federation = Federation(
        lambda: Net(part, run),
        data,
        FedAvg(lr=0.2),
        modes=2,
        batch_size=2,
        engine=engine,
        dtype=torch.float64,
    )
    list(federation.rounds(2))
    return federation


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("name", PARTS)
def test_results_are_those_without_it(name, engine):
    got, expected = (
        trained(PARTS[name], run, kind)
        for run, kind in ((activation_checkpoint, engine), (keep, "loop"))
    )
    if engine == "vector":
        assert got.engine.stacked, got.engine.notes
    require_close(got.state.modes, expected.state.modes, name)
    require_close({"b": got.state.buffers}, {"b": expected.state.buffers}, name)
    with torch.no_grad():
        models = [federation.ensemble.module(0).eval() for federation in (got, expected)]
        x = torch.ones(2, LENGTH, WIDTH, dtype=torch.float64)
        require_close(*({"outputs": model(x)} for model in models), name)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_the_part_runs_again_in_the_backward_pass(engine):
    calls = []
    for run in (keep, activation_checkpoint):
        model = trained(PARTS["linear"], run, engine).model.training_model
        calls.append(model.calls)
    assert calls[1] == 2 * calls[0] > 0


def test_under_vmap_activations_are_kept():
    def part(net, x):
        return x - (x * net.scale).mean(0)

    with pytest.warns(EngineWarning, match="using vmap"):
        got = trained(part, activation_checkpoint, "vector")
    require_close(got.state.modes, trained(part, keep, "loop").state.modes, "Engines disagree")


def test_the_active_mode():
    assert active_randomness() is None
    with KeyedRandomness(prng.key(0, "a")) as outer:
        with KeyedRandomness(prng.key(0, "b")) as inner:
            assert active_randomness() is inner
        assert active_randomness() is outer
    assert active_randomness() is None


def test_outside_of_training_it_is_torchs():
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), torch.ones(2, 3)
    grads = []
    for run in (keep, activation_checkpoint):
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(run(layer, x).square().sum(), layer[0].weight)[0])
    torch.testing.assert_close(*grads)


def test_an_error_in_a_part_leaves_no_hooks():
    def fails(x):
        raise ValueError(x.tolist())

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"1\.0") as error:
        activation_checkpoint(fails, x)
    # While the error is kept, its frames are, too: torch's hooks would run `fails` again here.
    (gradient,) = torch.autograd.grad((x * x).sum(), x)
    assert gradient.tolist() == [2, 2, 2]
    assert error.value.args == ([1.0, 1.0, 1.0],)
