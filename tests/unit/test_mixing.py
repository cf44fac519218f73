"""A module that mixes the examples of a batch is never folded, whatever the first examples and the batch size are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import FedAvg, FederatedData, Federation
from fedensemble.testing.compare import require_close

WIDTH = 6


class Net(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.inside, self.out, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), mix

    def forward(self, x):
        return self.out(self.mix(self, x))


def centred(net, x):
    h = net.inside(x)
    return h - h.mean(0)


def centred_if_many(net, x):
    return centred(net, x) if len(x) > 8 else net.inside(x)


def clipped(net, x):
    return net.inside(x / x.abs().amax().clamp(min=3.0))


def attended(net, x):
    h = net.inside(x)
    return F.scaled_dot_product_attention(h, h, h)


def unpacked(net, x):
    first, second = net.inside.weight[:2].T.reshape(2, -1).unbind(0)  # a stack has other numbers of rows
    return net.inside(x) + first.sum() + second.sum()


MIXING = {"centred": centred, "if many": centred_if_many, "clipped": clipped, "attended": attended}
OTHERS = {
    "by name": (lambda net, x: F.linear(input=x, weight=net.inside.weight, bias=net.inside.bias), True),
    "norm by name": (lambda net, x: F.layer_norm(input=net.inside(x), normalized_shape=(WIDTH,)), True),
    "wrong for a stack": (unpacked, False),
}


def data(equal):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, WIDTH, generator=generator)
    if equal:
        x[:10] = 0
    y = torch.randint(0, 3, (40,), generator=generator)
    return FederatedData.from_arrays(x, y, [10, 12, 18], classes=3)


def trained(mix, equal, engine, batch):
    made = Federation(
        lambda: Net(mix), data(equal), FedAvg(lr=0.1), modes=2, batch_size=batch, engine=engine, dtype=torch.float64
    )
    list(made.rounds(2))
    return made


@pytest.mark.filterwarnings("ignore::fedensemble.errors.EngineWarning")
@pytest.mark.parametrize("batch", [4, 10])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("case", MIXING)
def test_mixing_is_found(case, equal, batch):
    got, expected = (trained(MIXING[case], equal, engine, batch) for engine in ("vector", "loop"))
    assert not got.engine.folded
    assert "mixes the examples" in got.engine.notes[0]
    require_close(got.state.modes, expected.state.modes, f"Engines disagree on {case}")


@pytest.mark.filterwarnings("ignore::fedensemble.errors.EngineWarning")
@pytest.mark.parametrize("case", OTHERS)
def test_what_does_not_mix(case):
    mix, folded = OTHERS[case]
    got, expected = (trained(mix, False, engine, 4) for engine in ("vector", "loop"))
    assert got.engine.folded == folded
    require_close(got.state.modes, expected.state.modes, f"Engines disagree on {case}")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_compiled_script_is_counted_as_nothing():
    made = Federation(
        lambda: nn.Sequential(nn.Linear(WIDTH, 3), torch.jit.script(nn.ReLU())), data(False), FedAvg(), modes=1
    )
    assert made.engine.folded
    assert next(made.rounds(1)).losses.isfinite().all()
