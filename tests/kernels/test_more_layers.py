"""The Triton kernels of depthwise and transposed convolutions, LayerNorm, GRU and RNN layers.

They are compared with torch in float64; see test_kernels.py for how to run them.
"""

import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

from fedensemble.engines.stacked import dispatch
from fedensemble.engines.stacked.gradient import stacked_gradient
from fedensemble.engines.stacked.stacked_params import StackedParam
from fedensemble.modeling.functional_model import FunctionalModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not INTERPRETED, reason="neither a GPU nor Triton's interpreter"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the interpreter's, of numpy
]
repeatable = settings(
    # On a GPU each example compiles kernels for its shape.
    max_examples=30 if DEVICE == "cpu" else 5,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
visits, batches = st.integers(1, 3), st.integers(1, 4)


def pairs(least, most):
    return st.tuples(st.integers(least, most), st.integers(least, most))


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def lying_apart(values):
    """The same numbers as a view whose rows lie apart, as parameters do in a matrix of weights."""
    flat = values.flatten(1)
    room = torch.full((len(flat), flat.shape[1] + 5), float("nan"), device=DEVICE)
    room[:, 3:-2] = flat
    return room[:, 3:-2].unflatten(1, values.shape[1:])


def exact_copies(tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def assert_same(found, expected, error=1e-5):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert float((a.double() - b).detach().norm()) <= error * float(1e-3 + b.detach().norm())


def gradients(out, tensors, back):
    wanted = [t for t in tensors if t is not None]
    return torch.autograd.grad(out, wanted, back.to(out.dtype), allow_unused=True)


@pytest.fixture(autouse=True)
def full_precision():
    torch.set_float32_matmul_precision("highest")


def filters(j, size, inner, outer, direct):
    """Filters [J, outer, inner, h, w] in storage order, and where their gradient goes."""
    stored = lying_apart(numbers(j, *size, inner, outer, seed=1))
    weight = stored.permute(0, 4, 3, 1, 2).detach().requires_grad_()
    grads = torch.full((j, stored[0].numel() + 7), 9.0, device=DEVICE)
    place = grads[:, 4:-3].unflatten(1, stored.shape[1:]).permute(0, 4, 3, 1, 2)
    return weight, place, StackedParam(weight.detach(), place) if direct else None


@given(
    visits,
    batches,
    st.sampled_from([1, 3, 16, 17, 40, 64]),
    pairs(1, 9),
    pairs(1, 5),
    pairs(1, 3),
    pairs(0, 3),
    pairs(1, 2),
    st.booleans(),
    st.booleans(),
)
@example(2, 2, 33, (8, 8), (7, 7), (1, 1), (3, 3), (1, 1), True, True)
@example(1, 2, 5, (24, 25), (3, 3), (2, 2), (1, 1), (1, 1), False, True)  # splits
@repeatable
def test_depthwise(j, batch, width, image, size, stride, padding, dilation, biased, direct):
    from fedensemble.engines.kernels.triton.depthwise_conv import TritonDepthwise

    extent = [d * (s - 1) + 1 for d, s in zip(dilation, size, strict=True)]
    assume(all(i + 2 * p >= e for i, p, e in zip(image, padding, extent, strict=True)))
    x = numbers(j * batch, width, *image).requires_grad_()
    weight, place, param = filters(j, size, 1, width, direct)
    bias = lying_apart(numbers(j, width, seed=2)).requires_grad_() if biased else None
    exact = exact_copies((x, weight, bias))
    got = TritonDepthwise.apply(x, weight, bias, stride, padding, dilation, param)
    expected = torch.cat(
        [
            F.conv2d(
                part, exact[1][n], exact[2][n] if biased else None, stride, padding, dilation, width
            )
            for n, part in enumerate(exact[0].chunk(j))
        ]
    )
    back = numbers(*expected.shape, seed=3)
    found = list(gradients(got, (x, weight, bias), back))
    if direct:
        assert found[1] is None
        found[1] = place
    assert_same([got, *found], [expected, *gradients(expected, exact, back)])


@given(
    visits,
    batches,
    st.sampled_from([1, 3, 16, 17, 40]),
    st.sampled_from([1, 3, 16, 33, 65]),
    pairs(1, 7),
    pairs(1, 4),
    pairs(1, 3),
    pairs(0, 2),
    pairs(0, 2),
    st.booleans(),
    st.booleans(),
)
@example(2, 3, 32, 16, (8, 8), (4, 4), (2, 2), (1, 1), (0, 0), True, True)
@example(1, 2, 32, 16, (4, 5), (2, 2), (2, 2), (0, 0), (0, 0), True, True)
@example(1, 2, 16, 3, (4, 4), (3, 3), (2, 2), (1, 1), (1, 1), True, True)
@repeatable
def test_conv_transpose(
    j, batch, inputs, outputs, image, size, stride, padding, more, biased, direct
):
    from fedensemble.engines.kernels.triton.conv_transpose import TritonConvTranspose

    more = tuple(min(m, s - 1) for m, s in zip(more, stride, strict=True))
    sides = [
        (i - 1) * s - 2 * p + k + m
        for i, s, p, k, m in zip(image, stride, padding, size, more, strict=True)
    ]
    assume(min(sides) > 0)
    x = numbers(j * batch, inputs, *image).requires_grad_()
    weight, place, param = filters(j, size, outputs, inputs, direct)
    bias = lying_apart(numbers(j, outputs, seed=2)).requires_grad_() if biased else None
    exact = exact_copies((x, weight, bias))
    got = TritonConvTranspose.apply(x, weight, bias, stride, padding, more, param)
    expected = torch.cat(
        [
            F.conv_transpose2d(
                part, exact[1][n], exact[2][n] if biased else None, stride, padding, more
            )
            for n, part in enumerate(exact[0].chunk(j))
        ]
    )
    back = numbers(*expected.shape, seed=3)
    found = list(gradients(got, (x, weight, bias), back))
    if direct:
        assert found[1] is None
        found[1] = place
    assert_same([got, *found], [expected, *gradients(expected, exact, back)])


@given(
    visits,
    st.integers(1, 70),
    st.sampled_from([1, 5, 16, 100, 128, 300]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 30.0]),
)
@example(1, 600, 8, True, True, True, 30.0)  # many splits
@repeatable
def test_layer_norm(j, rows, size, centered, biased, direct, far):
    from fedensemble.engines.kernels.triton.layer_norm import StackedLayerNorm

    x = (numbers(j, rows, size) + far).requires_grad_()
    weight = lying_apart(numbers(j, size, seed=1)).requires_grad_()
    bias = lying_apart(numbers(j, size, seed=2)).requires_grad_() if biased and centered else None
    grads = numbers(2, j, size + 3)[:, :, 1:-2]
    params = tuple(
        StackedParam(t, g) if direct and t is not None else None
        for t, g in zip((weight, bias), grads, strict=True)
    )
    exact = exact_copies((x, weight, bias))
    eps = 1e-2
    got = StackedLayerNorm.apply(x, weight, bias, eps, centered, params)
    value = exact[0] - exact[0].mean(-1, keepdim=True) if centered else exact[0]
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    expected = value * scale * exact[1][:, None]
    expected = expected if bias is None else expected + exact[2][:, None]
    back = numbers(*expected.shape, seed=3)
    found = list(gradients(got, (x, weight, bias), back))
    if direct:
        assert found[1:] == [None] * (len(found) - 1)
        found[1:] = grads[: len(found) - 1]
    assert_same([got, *found], [expected, *gradients(expected, exact, back)], 1e-4)


@given(
    visits,
    st.integers(1, 70),
    st.sampled_from([1, 3, 16, 65]),
    st.sampled_from([1, 10, 16, 40, 130]),
    st.booleans(),
    st.booleans(),
)
@example(1, 600, 3, 5, True, True)  # torch's own matmul for the weight gradient, splits
@example(2, 600, 3, 70, True, False)
@repeatable
def test_linear(j, rows, inputs, outputs, biased, direct):
    from fedensemble.engines.kernels.triton.linear import StackedLinear

    x = numbers(j, rows, inputs).requires_grad_()
    weight = lying_apart(numbers(j, outputs, inputs, seed=1)).requires_grad_()
    bias = lying_apart(numbers(j, outputs, seed=2)).requires_grad_() if biased else None
    grads = [torch.full((j, size + 3), 9.0, device=DEVICE) for size in (outputs * inputs, outputs)]
    places = [grads[0][:, 1:-2].unflatten(1, (outputs, inputs)), grads[1][:, 1:-2]]
    # `param.weight` is what matmuls read; without `direct`, gradients go through autograd.
    params = [
        None if t is None else StackedParam(t.detach(), place if direct else None)
        for t, place in zip((weight, bias), places, strict=True)
    ]
    exact = exact_copies((x, weight, bias))
    got = StackedLinear.apply(x, weight, bias, *params)
    expected = exact[0] @ exact[1].mT
    expected = expected if bias is None else expected + exact[2][:, None]
    back = numbers(*expected.shape, seed=3)
    found = list(gradients(got, (x, weight, bias), back))
    if direct:
        assert found[1:] == [None] * (len(found) - 1)
        found[1:] = places[: len(found) - 1]
        assert all(bool((g[:, [0, -2, -1]] == 9).all()) for g in grads)
    assert_same([got, *found], [expected, *gradients(expected, exact, back)])


class Recurrent(nn.Module):
    """Recurrent layers and a linear layer over the states of all steps."""

    def __init__(self, kind, features, width, options):
        super().__init__()
        self.layers = kind(features, width, batch_first=True, **options)
        self.out = nn.Linear(width * (2 if options["bidirectional"] else 1), 3)

    def forward(self, x):
        states, last = self.layers(x)
        last = last[0] if isinstance(last, tuple) else last
        return self.out(states).mean(1) + self.out(states[:, -1]) + last.sum((0, 2))[:, None]


def compare(model, visits, batch, *shape, used=()):
    """Gradients by the kernels, in float32, are those of single passes in float64."""
    x, y = numbers(visits, batch, *shape), torch.arange(batch, device=DEVICE).repeat(visits, 1) % 3
    weight = torch.ones(visits, batch, dtype=torch.bool, device=DEVICE)
    keys = torch.arange(visits, device=DEVICE)
    exact, quick = (
        FunctionalModel(model, "cross_entropy", y[0], DEVICE, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    theta, buffers = exact.init_params(0, visits)
    theta = theta + 0.1 * numbers(*theta.shape, seed=5).double()
    called = set()
    with pytest.MonkeyPatch.context() as patched:
        for function in used:
            original = function.forward
            patched.setattr(
                function,
                "forward",
                staticmethod(
                    lambda *a, name=function.__name__, run=original: called.add(name) or run(*a)
                ),
            )
        if DEVICE == "cpu":
            patched.setattr(dispatch, "triton_supported", lambda x: x.dtype == torch.float32)
        got = stacked_gradient(quick)(theta.float(), buffers.float(), x, y, weight, keys)
    assert called == {function.__name__ for function in used}
    expected = exact.gradient_function(batched=True)(theta, buffers, x.double(), y, weight, keys)
    assert_same((got[0], got[1][0]), (expected[0], expected[1][0]), 1e-4)


@given(
    st.sampled_from(["GRU", "tanh", "relu", "LSTM"]),
    visits,
    st.sampled_from([1, 3, 17]),
    st.integers(1, 4),
    st.sampled_from([2, 6, 16, 40]),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
@example("GRU", 2, 3, 3, 70, 1, True, True)
@example("tanh", 2, 3, 3, 70, 1, True, True)
@repeatable
def test_recurrent_layers(kind, j, batch, steps, width, layers, bidirectional, bias):
    from fedensemble.engines.kernels.triton.gru import TritonGRU
    from fedensemble.engines.kernels.triton.lstm import TritonLSTM
    from fedensemble.engines.kernels.triton.rnn import TritonRNN

    options = {"num_layers": layers, "bidirectional": bidirectional, "bias": bias}
    if kind in ("tanh", "relu"):
        options["nonlinearity"] = kind
    layer = {"GRU": nn.GRU, "LSTM": nn.LSTM}.get(kind, nn.RNN)
    kernel = {"GRU": TritonGRU, "LSTM": TritonLSTM}.get(kind, TritonRNN)
    compare(lambda: Recurrent(layer, 3, width, options), j, batch, steps, 3, used=[kernel])


class Images(nn.Module):
    """Depthwise, grouped, transposed and 3-D convolutions, LayerNorm and RMSNorm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 5, padding=2, groups=8)
        self.grouped = nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=4)
        self.norm, self.rms = nn.LayerNorm(8), nn.RMSNorm((12, 4))
        self.up = nn.ConvTranspose2d(12, 6, 3, stride=2, padding=1, output_padding=1)
        self.line = nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1)
        self.volume = nn.Conv3d(1, 2, 3, stride=(2, 1, 1), padding=1)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        x = self.depthwise(self.stem(x))
        x = x + self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = self.up(self.rms(self.grouped(x).movedim(1, -2)).movedim(-2, 1))
        x = x + self.volume(x[:, None]).flatten(1, 2)
        return self.out(self.line(x.flatten(2)).mean(2))


def test_images_by_kernels():
    from fedensemble.engines.kernels.triton.conv_transpose import TritonConvTranspose
    from fedensemble.engines.kernels.triton.depthwise_conv import TritonDepthwise
    from fedensemble.engines.kernels.triton.layer_norm import StackedLayerNorm

    compare(Images, 2, 3, 3, 8, 8, used=[TritonConvTranspose, TritonDepthwise, StackedLayerNorm])
