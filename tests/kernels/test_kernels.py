"""The Triton kernels against torch in float64: on a GPU, or on a CPU by Triton's interpreter.

pip install triton && TRITON_INTERPRET=1 pytest tests/kernels
"""

import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble.engines.stacked import aligned_rows, dispatch
from fedensemble.engines.stacked.equivalence import check_stackable
from fedensemble.engines.stacked.gradient import stacked_gradient
from fedensemble.modeling.functional_model import FunctionalModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not INTERPRETED, reason="neither a GPU nor Triton's interpreter"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the interpreter's, of numpy
]
# the interpreter has no others
PRODUCTS = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


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
    from fedensemble.engines.kernels.cpu_conv import grouped_conv
    from fedensemble.engines.kernels.triton.conv import TritonConvolution

    channels, outputs, side, size, stride, padding = shape
    torch.manual_seed(0)
    x = torch.randn(6, channels, side, side, device=DEVICE, dtype=dtype)
    weight = (
        torch.randn(2, outputs, channels, size, size, device=DEVICE, dtype=dtype)
        / (channels * size * size) ** 0.5
    )
    # a view, as out of a flat vector
    bias = torch.randn(2, 2 * outputs, device=DEVICE, dtype=dtype)[:, :outputs]
    given = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    torch.set_float32_matmul_precision("highest")
    got = TritonConvolution.apply(*given, (stride, stride), (padding, padding), None)
    expected = (
        grouped_conv(*exact[:2], (stride, stride), (padding, padding))
        + exact[2].repeat_interleave(3, 0)[:, :, None, None]
    )
    grad_output = torch.randn_like(got)
    pairs = [(got, expected)]
    pairs += zip(
        torch.autograd.grad(got, given, grad_output),
        torch.autograd.grad(expected, exact, grad_output.double()),
        strict=True,
    )
    for a, b in pairs:
        assert apart(a, b) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fusion", ["", "relu", "add_relu"])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((3, 4, 5, 6), None),
        ((2, 12, 64, 16), None),
        ((60, 2, 70, 4), None),
        ((2, 50, 6, 1), None),
        ((3, 4, 6, 6), 2),
        ((2, 3, 64, 16), 2),
        ((7, 2, 70, 4), 5),
        ((2, 3, 40, 5), 40),
        ((2, 3, 512, 4), 2),
        ((2, 25, 12, 1), 1),
    ],
)  # BatchNorm where there are no groups
def test_norm_kernels(shape, groups, fusion, dtype):
    from fedensemble.engines.kernels.triton.batch_norm import BatchNorm
    from fedensemble.engines.kernels.triton.group_norm import GroupNorm
    from fedensemble.engines.kernels.triton.norm import StackedNorm
    from fedensemble.engines.stacked.stacked_params import StackedParam

    visits, batch, channels, side = shape
    torch.manual_seed(0)
    weights, param_grads = torch.randn(2, visits, 2 * channels + 7, device=DEVICE)
    first, last = slice(3, 3 + channels), slice(-channels, None)  # views, as out of a flat vector
    weight, bias = (weights[:, part].detach().requires_grad_() for part in (first, last))
    kept = torch.rand(visits, 2 * channels + 1, device=DEVICE)
    mean, variance = kept[:, :channels], kept[:, -channels:]
    x = torch.randn(visits * batch, channels, side, side, device=DEVICE) + 3 * torch.randn(
        1, channels, 1, 1, device=DEVICE
    )
    x = x.to(dtype).requires_grad_()
    pieces = StackedParam(weight, param_grads[:, first]), StackedParam(bias, param_grads[:, last])
    more = torch.randn_like(x).requires_grad_()
    added = more if fusion == "add_relu" else None
    kind = GroupNorm(groups, 1e-5) if groups else BatchNorm(mean, variance, 1e-5, 0.1)
    got, known = StackedNorm.apply(x, weight, bias, kind, fusion != "", pieces, added)
    grad_output = torch.randn_like(got)
    along = torch.autograd.grad(got, (x, weight, bias, more), grad_output, allow_unused=True)
    assert along[1] is along[2] is None

    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias, more)]
    means, variances = mean.double(), variance.double()
    one_by_one = [
        F.group_norm(images, groups, exact[1][j], exact[2][j], 1e-5)
        if groups
        else F.batch_norm(images, means[j], variances[j], exact[1][j], exact[2][j], True, 0.1, 1e-5)
        for j, images in enumerate(exact[0].chunk(visits))
    ]
    expected = torch.cat(one_by_one)
    if fusion == "add_relu":
        expected = expected + exact[3]
    if fusion:  # by our own signs: near 0, rounding decides
        expected = expected * (got > 0)
    pairs = (
        [(got, expected)] if groups else [(got, expected), (known[4], means), (known[5], variances)]
    )
    grads_found = (along[0], param_grads[:, first], param_grads[:, last], along[3])
    right = torch.autograd.grad(
        expected, exact[: 4 if fusion == "add_relu" else 3], grad_output.double()
    )
    pairs += zip(grads_found, right, strict=False)
    for a, b in pairs:
        assert apart(a, b) < (1e-2 if dtype == torch.bfloat16 else 1e-4)


def lstm(given, hidden, cell, weight):
    """One layer in plain operations."""
    outputs = []
    for now in given.unbind(1):
        fed = torch.bmm(hidden.reshape(len(weight), -1, hidden.shape[-1]), weight.mT).reshape(
            now.shape
        )
        i, f, g, o = (now + fed).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs, 1), cell


@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (3, 17, 4, 40), (3, 70, 2, 128), (1, 2, 1, 16)])
def test_lstm_kernels(shape):
    from fedensemble.engines.kernels.triton.lstm import TritonLSTM

    visits, batch, steps, width = shape
    torch.manual_seed(0)
    sizes = ((visits * batch, steps, 4 * width), (visits * batch, width), (visits * batch, width))
    given = [torch.randn(*size, device=DEVICE).requires_grad_() for size in sizes]
    given.append(
        (torch.randn(visits, 4 * width, width, device=DEVICE) / width**0.5).requires_grad_()
    )
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    torch.set_float32_matmul_precision("highest")
    got, expected = TritonLSTM.apply(*given), lstm(*exact)
    grad_outputs = [torch.randn_like(tensor) for tensor in got]
    pairs = list(zip(got, expected, strict=True))
    pairs += zip(
        torch.autograd.grad(got, given, grad_outputs),
        torch.autograd.grad(expected, exact, [grad.double() for grad in grad_outputs]),
        strict=True,
    )
    for a, b in pairs:
        assert apart(a, b) < 1e-5


def test_dropout_kernel():
    from fedensemble import prng
    from fedensemble.engines.kernels.triton.dropout import dropout_mask

    keys = torch.tensor([5, -7, 2**62], device=DEVICE)
    assert torch.equal(dropout_mask(keys, 3000, 2**62).cpu(), prng.bits(keys.cpu(), 3000) >= 2**62)


@pytest.mark.parametrize(("size", "step"), [(3, 3), (2, 2), (1, 2), (2, 3)])
def test_pooling_kernel(size, step):
    from fedensemble.engines.kernels.triton.max_pool import TritonMaxPool2d

    torch.manual_seed(0)
    x = torch.randn(3, 5, 7, 8, device=DEVICE).requires_grad_()
    got, expected = TritonMaxPool2d.apply(x, size, step), F.max_pool2d(x, size, step)
    grad_output = torch.randn_like(expected)
    assert torch.equal(got, expected)
    assert torch.equal(*(torch.autograd.grad(out, x, grad_output)[0] for out in (got, expected)))


def test_batch_norm_far_from_zero():
    """Sums of squares about 0 would lose all digits here."""
    from fedensemble.engines.kernels.triton.batch_norm import BatchNorm
    from fedensemble.engines.kernels.triton.norm import StackedNorm

    torch.manual_seed(0)
    x = torch.randn(2 * 8, 3, 4, 4, device=DEVICE) + 3000
    weight, bias, mean, variance = torch.rand(4, 2, 3, device=DEVICE)
    got, _ = StackedNorm.apply(
        x, weight, bias, BatchNorm(mean, variance, 1e-5, 0.1), False, (None, None)
    )
    expected = [
        F.batch_norm(part.double(), None, None, w.double(), b.double(), True)
        for part, w, b in zip(x.chunk(2), weight, bias, strict=True)
    ]
    assert float((got - torch.cat(expected)).abs().max()) < 1e-2


@pytest.mark.parametrize("steep", [0, 30])
@pytest.mark.parametrize(
    ("channels", "groups", "side"), [(6, 2, 16), (70, 5, 3), (9, 9, 8), (260, 1, 1)]
)
def test_group_norm_far_from_zero(channels, groups, side, steep):
    """Channels lie far from 0, and `steep` beyond the one before: neither may cost digits."""
    from fedensemble.engines.kernels.triton.group_norm import GroupNorm
    from fedensemble.engines.kernels.triton.norm import StackedNorm

    torch.manual_seed(0)
    above = 1000 + steep * torch.arange(float(channels), device=DEVICE)[:, None, None]
    x = (torch.randn(2 * 3, channels, side, side, device=DEVICE) + above).requires_grad_()
    weight, bias = torch.rand(2, 2, channels, device=DEVICE)
    grad_output = torch.randn_like(x)
    got, _ = StackedNorm.apply(x, weight, bias, GroupNorm(groups, 1e-5), False, (None, None))
    exact = x.detach().double().requires_grad_()
    expected = torch.cat(
        [
            F.group_norm(part, groups, w.double(), b.double())
            for part, w, b in zip(exact.chunk(2), weight, bias, strict=True)
        ]
    )
    assert float((got - expected).detach().abs().max()) < 1e-3
    assert (
        apart(
            torch.autograd.grad(got, x, grad_output)[0],
            torch.autograd.grad(expected, exact, grad_output.double())[0],
        )
        < 1e-3
    )


@pytest.mark.parametrize("groups", [None, 4])
def test_norms_give_the_same_bits_again_and_without_gradients(groups):
    from fedensemble.engines.kernels.triton.batch_norm import BatchNorm
    from fedensemble.engines.kernels.triton.group_norm import GroupNorm
    from fedensemble.engines.kernels.triton.norm import StackedNorm

    torch.manual_seed(0)
    x = torch.randn(3 * 5, 8, 20, 21, device=DEVICE, requires_grad=True)
    weight, bias, mean, variance = torch.rand(4, 3, 8, device=DEVICE)
    grad_output = torch.randn_like(x)
    kind = GroupNorm(groups, 1e-5) if groups else BatchNorm(mean, variance, 1e-5, 0.1)
    made = []
    for _ in range(2):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        out, _ = StackedNorm.apply(*leaves, kind, True, (None, None))
        made.append((out, *torch.autograd.grad(out, leaves, grad_output)))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    with torch.no_grad():
        assert torch.equal(
            StackedNorm.apply(x, weight, bias, kind, True, (None, None))[0], made[0][0]
        )


@pytest.mark.skipif(DEVICE == "cpu", reason="too much for the interpreter")
@pytest.mark.parametrize("groups", [None, 2])
def test_more_sets_than_an_axis_of_a_grid_has(groups):
    from fedensemble.engines.kernels.triton.batch_norm import BatchNorm
    from fedensemble.engines.kernels.triton.group_norm import GroupNorm
    from fedensemble.engines.kernels.triton.norm import StackedNorm

    torch.manual_seed(0)
    visits, channels = 70_000, 8
    leaves = [
        torch.randn(shape, device=DEVICE, requires_grad=True)
        for shape in ((2 * visits, channels, 3), (visits, channels), (visits, channels))
    ]
    mean, variance = torch.rand(2, visits, channels, device=DEVICE)
    kind = GroupNorm(groups, 1e-2) if groups else BatchNorm(mean, variance, 1e-2, 0.1)
    got, _ = StackedNorm.apply(*leaves, kind, False, (None, None))
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    split = exact[0].reshape(visits, 2, groups or channels, -1, 3)
    over = (3, 4) if groups else (1, 3, 4)
    var, center = torch.var_mean(split, over, correction=0, keepdim=True)
    normal = ((split - center) / torch.sqrt(var + 1e-2)).reshape(visits, 2, channels, 3)
    expected = (normal * exact[1][:, None, :, None] + exact[2][:, None, :, None]).reshape(
        exact[0].shape
    )
    grad_output = torch.randn_like(got)
    along, right = (
        torch.autograd.grad(got, leaves, grad_output),
        torch.autograd.grad(expected, exact, grad_output.double()),
    )
    for a, b in zip((got, *along), (expected, *right), strict=True):
        assert apart(a, b) < 1e-4


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


class Grouped(nn.Module):
    """GroupNorms of all fusions, one used twice, one without weights, one whose groups a program
    cannot hold.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.other, self.shared = (
            nn.GroupNorm(3, 6),
            nn.GroupNorm(2, 6),
            nn.GroupNorm(1, 6),
        )
        self.plain, self.wide, self.out = (
            nn.GroupNorm(6, 6, affine=False),
            nn.GroupNorm(1, 4100),
            nn.Linear(4100, 3),
        )

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = nn.ReLU(inplace=True)(self.other(self.second(x)) + x)
        x = self.shared(torch.tanh(self.shared(x)))
        x = F.relu(self.plain(x))
        return self.out(self.wide(F.pad(x.flatten(1), (0, 4100 - 6 * 64))))


@pytest.mark.parametrize(
    ("model", "fusions", "grouped"),
    [(InPlace, ("relu", "", "", ""), 0), (Grouped, ("relu", "add_relu", "", "", "relu", ""), 4)],
)
def test_models_by_kernels(model, fusions, grouped, monkeypatch):
    from fedensemble.engines.kernels.triton.group_norm import GroupNorm

    used, known = [], GroupNorm.statistics
    monkeypatch.setattr(
        GroupNorm,
        "statistics",
        lambda self, *given: used.append(self.groups) or known(self, *given),
    )
    if DEVICE == "cpu":
        monkeypatch.setattr(dispatch, "triton_supported", lambda x: x.dtype == torch.float32)
    torch.manual_seed(0)
    visits, batch = 3, 4
    x, y = (
        torch.randn(visits, batch, 2, 8, 8, device=DEVICE),
        torch.randint(0, 3, (visits, batch), device=DEVICE),
    )
    more = (
        torch.ones(visits, batch, dtype=torch.bool, device=DEVICE),
        torch.arange(visits, device=DEVICE),
    )
    exact, quick = (
        FunctionalModel(model, "cross_entropy", y[0], DEVICE, kind)
        for kind in (torch.float64, torch.float32)
    )
    assert check_stackable(quick, x, y).fusions == fusions
    assert not used  # a trial is in float64
    theta, buffers = exact.init_params(0, visits)
    torch.set_float32_matmul_precision("highest")
    got = stacked_gradient(quick, fusions=fusions)(theta.float(), buffers.float(), x, y, *more)
    assert len(used) == grouped
    expected = stacked_gradient(exact)(theta, buffers, x.double(), y, *more)
    for a, b in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        assert apart(a, b) < 1e-4 if b.numel() else a.shape == b.shape


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("length", [5001, 4096])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of whatever lies between the rows
def test_step_kernels(length, decay):
    from fedensemble.engines.kernels.triton.sgd_step import copy_rows, sgd_step_

    torch.manual_seed(0)
    theta, grad = (aligned_rows.to_aligned(torch.randn(3, length, device=DEVICE)) for _ in range(2))
    rate = torch.tensor([[0.1], [0.0], [2.0]], device=DEVICE)
    grad[1, 7] = torch.nan  # of a visit that stands still
    assert aligned_rows.is_aligned(theta)
    # the interpreter cuts numbers off
    for dtype, error in ((torch.float32, 0.0), (torch.bfloat16, 2**-7)):
        before = theta.clone()
        copy, again = (aligned_rows.empty_aligned(theta, dtype) for _ in range(2))
        sgd_step_(theta, grad, rate, decay, copy)
        torch.testing.assert_close(theta, before - rate * (grad.nan_to_num() + decay * before))
        assert torch.equal(theta[1], before[1])
        copy_rows(theta.contiguous(), again)
        for made in (copy, again):
            torch.testing.assert_close(made[:, :length].float(), theta, rtol=error, atol=0)
    without = aligned_rows.to_aligned(before)
    sgd_step_(without, grad, rate, decay, None)
    assert torch.equal(without, theta)
