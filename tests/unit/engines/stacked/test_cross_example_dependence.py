"""A module that mixes the examples of a batch is never folded, whatever the first examples and the
batch size are.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import FedAvg, FederatedData, Federation
from fedensemble.engines.stacked.equivalence import check_stackable
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.testing.assertions import require_close

WIDTH = 6


class Net(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.inside, self.out, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), mix

    def forward(self, x):
        return self.out(self.mix(self, x))


def centered(net, x):
    h = net.inside(x)
    return h - h.mean(0)


def centred_if_many(net, x):
    return centered(net, x) if len(x) > 8 else net.inside(x)


def clipped(net, x):
    return net.inside(x / x.abs().amax().clamp(min=3.0))


def attended(net, x):
    h = net.inside(x)
    return F.scaled_dot_product_attention(h, h, h)


def unpacked(net, x):
    # a stack has other numbers of rows
    first, second = net.inside.weight[:2].T.reshape(2, -1).unbind(0)
    return net.inside(x) + first.sum() + second.sum()


def hardly(net, x):
    return net.inside(x + 1e-7 * x.mean(0))


MIXING = {
    "centered": centered,
    "if many": centred_if_many,
    "clipped": clipped,
    "attended": attended,
    "hardly": hardly,
}
OTHERS = {
    "by name": (
        lambda net, x: F.linear(input=x, weight=net.inside.weight, bias=net.inside.bias),
        True,
    ),
    "norm by name": (
        lambda net, x: F.layer_norm(input=net.inside(x), normalized_shape=(WIDTH,)),
        True,
    ),
    "a weight in parts": (unpacked, True),
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
        lambda: Net(mix),
        data(equal),
        FedAvg(lr=0.1),
        modes=2,
        batch_size=batch,
        engine=engine,
        dtype=torch.float64,
    )
    list(made.rounds(2))
    return made


@pytest.mark.filterwarnings("ignore::fedensemble.errors.EngineWarning")
@pytest.mark.parametrize("batch", [4, 10])
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("case", MIXING)
def test_mixing_is_found(case, equal, batch):
    got, expected = (trained(MIXING[case], equal, engine, batch) for engine in ("vector", "loop"))
    assert not got.engine.stacked
    assert "cross-example dependence" in got.engine.notes[0]
    require_close(got.state.modes, expected.state.modes, f"Engines disagree on {case}")


@pytest.mark.filterwarnings("ignore::fedensemble.errors.EngineWarning")
@pytest.mark.parametrize("case", OTHERS)
def test_what_does_not_mix(case):
    mix, folded = OTHERS[case]
    got, expected = (trained(mix, False, engine, 4) for engine in ("vector", "loop"))
    assert got.engine.stacked == folded
    require_close(got.state.modes, expected.state.modes, f"Engines disagree on {case}")


class Tokens(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(3, 4), nn.Embedding(2 * WIDTH, 4)
        self.out, self.mix = nn.Linear(4, 3), mix

    def forward(self, x):
        return self.out(self.mix(self, x).mean(1))


def of_tokens(mix, engine, batch):
    x = torch.arange(24 * 8).reshape(24, 8) % 3
    data = FederatedData.from_arrays(x, torch.arange(24) % 3, [8, 4, 12], classes=3)
    made = Federation(
        lambda: Tokens(mix),
        data,
        FedAvg(lr=0.1),
        modes=2,
        batch_size=batch,
        engine=engine,
        dtype=torch.float64,
    )
    list(made.rounds(2))
    return made


def test_mixing_of_tokens_is_found_where_the_given_do_not_show_it():
    # each visit has a 0 and a 1 at every place
    x = torch.arange(12).reshape(6, 2, 1).repeat(1, 1, 8) % 2
    y = torch.arange(12).reshape(6, 2) % 3

    def reason(mix):
        return check_stackable(
            FunctionalModel(lambda: Tokens(mix), "cross_entropy", y[0], dtype=torch.float64), x, y
        ).reason

    assert reason(lambda net, x: net.embedding(1 - x)) is None
    assert "cross-example dependence" in reason(lambda net, x: net.embedding(x.amax(0) - x))


POSITIONS = {
    "one row": lambda x: torch.arange(8),
    "a batch": lambda x: torch.arange(8).expand(len(x), 8),
    "of tokens": lambda x: torch.ones_like(x).cumsum(1) - 1,
}


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("case", POSITIONS)
def test_positions(case, batch):
    def placed(net, x):
        return (net.embedding(x) + net.positions(POSITIONS[case](x))).tanh()

    got, expected = (of_tokens(placed, engine, batch) for engine in ("vector", "loop"))
    assert got.engine.stacked, got.engine.notes
    require_close(got.state.modes, expected.state.modes, f"Engines disagree on positions, {case}")


def test_rounding_that_grows_is_no_mixing():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.arange(12).reshape(4, 3) % 3

    def reason(mix, x):
        def normed(net, x):
            return F.batch_norm(net.inside(mix(x)), None, None, training=True, eps=1e-20)

        return check_stackable(
            FunctionalModel(lambda: Net(normed), "cross_entropy", y[0], dtype=torch.float64), x, y
        ).reason

    # Of examples that are nearly the same the last digits become the first ones: slopes differ by
    # 1e-8.
    assert reason(lambda x: x, 1 + 1e-4 * x) is None
    assert "cross-example dependence" in reason(lambda x: x * (1 + 1e-6 * x.mean(0)), x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_compiled_script_is_counted_as_nothing():
    made = Federation(
        lambda: nn.Sequential(nn.Linear(WIDTH, 3), torch.jit.script(nn.ReLU())),
        data(False),
        FedAvg(),
        modes=1,
    )
    assert made.engine.stacked
    assert next(made.rounds(1)).losses.isfinite().all()
