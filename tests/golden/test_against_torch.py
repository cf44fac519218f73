"""Optimizers and recurrent layers against torch's own."""

import pytest
import torch
from torch import nn

from fedensemble import SGD, Adam, prng
from fedensemble.modeling.keyed_rng import KeyedRandomness
from fedensemble.testing.toy_problems import numbers

# The same formulas in float64 written in another order: some hundred roundings of 1e-16, on numbers
# of order one.
SAME_FORMULA = 1e-12
STEPS, SIZE = 30, 7

OPTIMIZERS = [
    (SGD(), lambda p: torch.optim.SGD(p, lr=0.1)),
    (SGD(momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (
        SGD(momentum=0.5, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.1),
    ),
    (Adam(), lambda p: torch.optim.Adam(p, lr=0.1)),
    (
        Adam(beta1=0.5, beta2=0.9, epsilon=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.1),
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), OPTIMIZERS)
@pytest.mark.parametrize("clip", [0.0, 0.7])
def test_optimizer(ours, theirs, clip):
    ours = type(ours)(**{**{f: getattr(ours, f) for f in ours.__dataclass_fields__}, "clip": clip})
    start, curvature = numbers(SIZE, word=1), numbers(SIZE, word=2).abs() + 0.1
    parameter = nn.Parameter(start.clone())
    optimizer = theirs([parameter])
    theta, slots = start, ours.init_state(start)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (0.5 * curvature * parameter**2).sum().backward()
        if clip:
            # torch divides by (norm + 1e-6) where we divide by the norm; clip by hand to compare
            # the rest exactly
            norm = parameter.grad.norm()
            parameter.grad *= min(1.0, clip / float(norm))
        optimizer.step()
        theta, slots = ours.step(theta, curvature * theta, slots, 0.1)
        torch.testing.assert_close(theta, parameter.detach(), rtol=0, atol=SAME_FORMULA)


def test_clipping_takes_each_row_alone():
    gradient = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    clipped = SGD(clip=1.0).prepare(torch.zeros(3, 2), gradient)
    torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


RECURRENT = [nn.LSTM, nn.GRU, nn.RNN]


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_recurrent(kind, layers, bidirectional, batch_first, bias):
    torch.manual_seed(0)
    module = kind(
        4,
        5,
        num_layers=layers,
        bidirectional=bidirectional,
        batch_first=batch_first,
        bias=bias,
        dtype=torch.float64,
    )
    x = numbers(3, 6, 4)
    for initial in (None, _states(kind, layers * (1 + bidirectional), 3 if batch_first else 6)):
        expected = module(x, initial)
        with KeyedRandomness(prng.key(0, "test")):
            got = module(x, initial)
        torch.testing.assert_close(got, expected, rtol=0, atol=SAME_FORMULA)
        ours, theirs = (
            torch.autograd.grad(out[0].square().sum(), list(module.parameters()))
            for out in (got, expected)
        )
        # sums over steps and examples
        torch.testing.assert_close(ours, theirs, rtol=0, atol=100 * SAME_FORMULA)


def _states(kind, count, batch):
    states = tuple(numbers(count, batch, 5, word=word) for word in (1, 2))
    return states if kind is nn.LSTM else states[0]


def test_relu_network_and_single_sequence():
    torch.manual_seed(0)
    module = nn.RNN(4, 5, nonlinearity="relu", dtype=torch.float64)
    for x in (numbers(6, 3, 4), numbers(6, 4)):
        with KeyedRandomness(0):
            got = module(x)
        torch.testing.assert_close(got, module(x), rtol=0, atol=SAME_FORMULA)


@pytest.mark.parametrize("kind", RECURRENT)
def test_dropout_between_layers(kind):
    torch.manual_seed(0)
    module = kind(4, 50, num_layers=2, dropout=0.5, batch_first=True, dtype=torch.float64)
    x = numbers(8, 6, 4)
    key = prng.key(0, "test")
    outputs = []
    for at in (key, key, prng.fold_in(key, 1)):
        with KeyedRandomness(at):
            outputs.append(module(x)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    module.eval()
    with KeyedRandomness(key):
        torch.testing.assert_close(module(x), module(x), rtol=0, atol=0)
    plain = kind(4, 50, num_layers=2, dropout=0.5, batch_first=True, dtype=torch.float64).eval()
    plain.load_state_dict(module.state_dict())
    with KeyedRandomness(key):
        got = module(x)
    torch.testing.assert_close(got, plain(x), rtol=0, atol=SAME_FORMULA)
