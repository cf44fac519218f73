"""The Triton kernels against torch in float64: on a GPU, or on a CPU by Triton's interpreter.

pip install triton && TRITON_INTERPRET=1 pytest tests/kernels
"""

import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble.core.learner import Learner
from fedensemble.engines import kernels, lines
from fedensemble.engines.fold_check import can_fold
from fedensemble.engines.folded_gradient import folded_gradient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="neither a GPU nor Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the interpreter's, of numpy
]
PRODUCTS = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]  # the interpreter has no others


def apart(a, b):
    """How far `a` is from `b`, relative to its size."""
    return float((a.double() - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize(
    "shape",
    [
        (3, 5, 8, 3, 1, 1),
        (3, 5, 9, 3, 2, 1),
        (1, 10, 28, 5, 1, 0),
        (4, 6, 8, 1, 2, 0),
        (64, 96, 16, 3, 1, 1),
        (32, 64, 30, 3, 2, 0),
        (16, 16, 8, 3, 1, 1),
        (16, 24, 9, 3, 2, 1),
        (24, 16, 8, 1, 2, 0),
        (16, 32, 11, 5, 3, 2),
        (130, 140, 4, 3, 1, 1),
    ],
)
def test_convolution_kernels(shape, dtype):
    from fedensemble.engines.kernels import grouped
    from fedensemble.engines.triton_conv import TritonConvolution

    channels, outputs, side, size, stride, padding = shape
    torch.manual_seed(0)
    x = torch.randn(6, channels, side, side, device=DEVICE, dtype=dtype)
    weight = torch.randn(2, outputs, channels, size, size, device=DEVICE, dtype=dtype) / (channels * size * size) ** 0.5
    bias = torch.randn(2, 2 * outputs, device=DEVICE, dtype=dtype)[:, :outputs]  # a view, as out of a flat vector
    given = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    torch.set_float32_matmul_precision("highest")
    got = TritonConvolution.apply(*given, (stride, stride), (padding, padding), None)
    expected = (
        grouped(*exact[:2], (stride, stride), (padding, padding)) + exact[2].repeat_interleave(3, 0)[:, :, None, None]
    )
    slope = torch.randn_like(got)
    pairs = [(got, expected)]
    pairs += zip(
        torch.autograd.grad(got, given, slope), torch.autograd.grad(expected, exact, slope.double()), strict=True
    )
    for a, b in pairs:
        assert apart(a, b) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fate", ["", "relu", "sum"])
@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (2, 12, 64, 16), (60, 2, 70, 4), (2, 50, 6, 1)])
def test_batch_norm_kernels(shape, fate, dtype):
    import torch.nn.functional as F

    from fedensemble.engines.pieces import Piece
    from fedensemble.engines.triton_norm import StackedBatchNorm

    visits, batch, channels, side = shape
    torch.manual_seed(0)
    weights, slopes = torch.randn(2, visits, 2 * channels + 7, device=DEVICE)
    first, last = slice(3, 3 + channels), slice(-channels, None)  # views, as out of a flat vector
    weight, bias = (weights[:, part].detach().requires_grad_() for part in (first, last))
    kept = torch.rand(visits, 2 * channels + 1, device=DEVICE)
    mean, variance = kept[:, :channels], kept[:, -channels:]
    x = torch.randn(visits * batch, channels, side, side, device=DEVICE) + 3 * torch.randn(
        1, channels, 1, 1, device=DEVICE
    )
    x = x.to(dtype).requires_grad_()
    pieces = Piece(weight, slopes[:, first]), Piece(bias, slopes[:, last])
    more = torch.randn_like(x).requires_grad_()
    added = more if fate == "sum" else None
    got, known = StackedBatchNorm.apply(x, weight, bias, mean, variance, 1e-5, 0.1, fate != "", pieces, added)
    slope = torch.randn_like(got)
    along = torch.autograd.grad(got, (x, weight, bias, more), slope, allow_unused=True)
    assert along[1] is along[2] is None

    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias, more)]
    means, variances = mean.double(), variance.double()
    one_by_one = [
        F.batch_norm(images, means[j], variances[j], exact[1][j], exact[2][j], True, 0.1, 1e-5)
        for j, images in enumerate(exact[0].chunk(visits))
    ]
    expected = torch.cat(one_by_one)
    if fate == "sum":
        expected = expected + exact[3]
    if fate:  # by our own signs: near 0, rounding decides
        expected = expected * (got > 0)
    pairs = [(got, expected), (known[4], means), (known[5], variances)]
    slopes_found = (along[0], slopes[:, first], slopes[:, last], along[3])
    right = torch.autograd.grad(expected, exact[: 4 if fate == "sum" else 3], slope.double())
    pairs += zip(slopes_found, right, strict=False)
    for a, b in pairs:
        assert apart(a, b) < (1e-2 if dtype == torch.bfloat16 else 1e-4)


def lstm(given, hidden, cell, weight):
    """One layer in plain operations."""
    outputs = []
    for now in given.unbind(1):
        fed = torch.bmm(hidden.reshape(len(weight), -1, hidden.shape[-1]), weight.mT).reshape(now.shape)
        i, f, g, o = (now + fed).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs, 1), cell


@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (3, 17, 4, 40), (3, 70, 2, 128), (1, 2, 1, 16)])
def test_lstm_kernels(shape):
    from fedensemble.engines.triton_lstm import TritonLSTM

    visits, batch, steps, width = shape
    torch.manual_seed(0)
    sizes = ((visits * batch, steps, 4 * width), (visits * batch, width), (visits * batch, width))
    given = [torch.randn(*size, device=DEVICE).requires_grad_() for size in sizes]
    given.append((torch.randn(visits, 4 * width, width, device=DEVICE) / width**0.5).requires_grad_())
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    torch.set_float32_matmul_precision("highest")
    got, expected = TritonLSTM.apply(*given), lstm(*exact)
    slopes = [torch.randn_like(tensor) for tensor in got]
    pairs = list(zip(got, expected, strict=True))
    pairs += zip(
        torch.autograd.grad(got, given, slopes),
        torch.autograd.grad(expected, exact, [slope.double() for slope in slopes]),
        strict=True,
    )
    for a, b in pairs:
        assert apart(a, b) < 1e-5


def test_dropout_kernel():
    from fedensemble import draws
    from fedensemble.engines.triton_dropout import kept

    keys = torch.tensor([5, -7, 2**62], device=DEVICE)
    assert torch.equal(kept(keys, 3000, 2**62).cpu(), draws.bits(keys.cpu(), 3000) >= 2**62)


@pytest.mark.parametrize(("size", "step"), [(3, 3), (2, 2), (1, 2), (2, 3)])
def test_pooling_kernel(size, step):
    from fedensemble.engines.triton_pool import SquarePool

    torch.manual_seed(0)
    x = torch.randn(3, 5, 7, 8, device=DEVICE).requires_grad_()
    got, expected = SquarePool.apply(x, size, step), F.max_pool2d(x, size, step)
    slope = torch.randn_like(expected)
    assert torch.equal(got, expected)
    assert torch.equal(*(torch.autograd.grad(out, x, slope)[0] for out in (got, expected)))


def test_batch_norm_far_from_zero():
    """Sums of squares about 0 would lose all digits here."""
    from fedensemble.engines.triton_norm import StackedBatchNorm

    torch.manual_seed(0)
    x = torch.randn(2 * 8, 3, 4, 4, device=DEVICE) + 3000
    weight, bias, mean, variance = torch.rand(4, 2, 3, device=DEVICE)
    got, _ = StackedBatchNorm.apply(x, weight, bias, mean, variance, 1e-5, 0.1, False, (None, None))
    expected = [F.batch_norm(part.double(), None, None, w.double(), b.double(), True)
                for part, w, b in zip(x.chunk(2), weight, bias, strict=True)]  # fmt: skip
    assert float((got - torch.cat(expected)).abs().max()) < 1e-2


class InPlace(nn.Module):
    """Layers whose outputs are written into, as in torchvision's networks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.other, self.shared = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        y = self.other(self.second(x))
        y += x
        y = F.max_pool2d(nn.ReLU6(inplace=True)(y), 2)
        y.tanh_()
        y = self.shared(torch.relu_(self.first(y[:, :2])))
        return self.out(self.shared(y).mean((2, 3)))


def test_layers_may_be_written_into(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "quick", lambda x: x.dtype == torch.float32)
    torch.manual_seed(0)
    visits, batch = 3, 4
    x, y = torch.randn(visits, batch, 2, 8, 8, device=DEVICE), torch.randint(0, 3, (visits, batch), device=DEVICE)
    more = torch.ones(visits, batch, dtype=torch.bool, device=DEVICE), torch.arange(visits, device=DEVICE)
    exact, quick = (Learner(InPlace, "cross_entropy", y[0], DEVICE, kind) for kind in (torch.float64, torch.float32))
    assert can_fold(quick, x, y) == (None, ("relu", "", "", ""))
    theta, buffers = exact.initial(0, visits)
    torch.set_float32_matmul_precision("highest")
    got = folded_gradient(quick, rectified=("relu", "", "", ""))(theta.float(), buffers.float(), x, y, *more)
    expected = folded_gradient(exact)(theta, buffers, x.double(), y, *more)
    for a, b in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        assert apart(a, b) < 1e-4


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("length", [5001, 4096])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of whatever lies between the rows
def test_step_kernels(length, decay):
    from fedensemble.engines.triton_step import copy_rows, descend

    torch.manual_seed(0)
    theta, slope = (lines.lined(torch.randn(3, length, device=DEVICE)) for _ in range(2))
    rate = torch.tensor([[0.1], [0.0], [2.0]], device=DEVICE)
    slope[1, 7] = torch.nan  # of a visit that stands still
    assert lines.in_line(theta)
    for dtype, error in ((torch.float32, 0.0), (torch.bfloat16, 2**-7)):  # the interpreter cuts numbers off
        before = theta.clone()
        copy, again = (lines.room_like(theta, dtype) for _ in range(2))
        descend(theta, slope, rate, decay, copy)
        torch.testing.assert_close(theta, before - rate * (slope.nan_to_num() + decay * before))
        assert torch.equal(theta[1], before[1])
        copy_rows(theta.contiguous(), again)
        for made in (copy, again):
            torch.testing.assert_close(made[:, :length].float(), theta, rtol=error, atol=0)
    without = lines.lined(before)
    descend(without, slope, rate, decay, None)
    assert torch.equal(without, theta)
