"""Pooling by planes gives what torch gives, ties and cut-off edges included."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedensemble import FedAvg, FederatedData, Federation
from fedensemble.engines.kernels.cpu_conv import choose_algorithm, on_cpu
from fedensemble.engines.kernels.cpu_fft_conv import available
from fedensemble.engines.kernels.cpu_max_pool import MaxPool2d, convolve_and_pool
from fedensemble.engines.local.block_size import activations
from fedensemble.runtime.num_threads import num_threads


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (1, 2, 7, 8), (3, 1, 3, 11)])
def test_as_torch(size, shape):
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(0, 3, shape, generator=generator).double()  # many ties
    for x in (few, torch.randn(shape, generator=generator, dtype=torch.float64)):
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        got, expected = MaxPool2d.apply(ours, size), F.max_pool2d(theirs, size)
        slope = torch.randn(got.shape, generator=generator, dtype=torch.float64)
        got.backward(slope)
        expected.backward(slope)
        assert torch.equal(got, expected)
        assert torch.equal(ours.grad, theirs.grad)


def test_nan_is_passed_on():
    x = torch.zeros(1, 1, 2, 2)
    x[0, 0, 1, 0] = float("nan")
    assert MaxPool2d.apply(x, 2).isnan().all()


def test_may_be_written_into():
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64).requires_grad_()
    slopes = [
        torch.autograd.grad(pool(x, 2).relu_().sum(), x)[0]
        for pool in (MaxPool2d.apply, F.max_pool2d)
    ]
    assert torch.equal(*slopes)


@pytest.fixture
def one_core():
    with num_threads(1):
        yield


LAYERS = {  # visits, batch, channels, outputs, image, filters; stride, padding, dilation, groups
    "one by one": ((3, 16, 1, 10, 28, 5), ((1, 1), (0, 0), (1, 1), 1)),
    "one by one, several channels": ((2, 8, 3, 9, 33, 3), ((1, 1), (1, 1), (1, 1), 1)),
    "one by one, stride": ((2, 16, 6, 6, 31, 3), ((2, 2), (1, 0), (1, 1), 1)),
    "one by one, groups": ((2, 16, 4, 8, 24, 3), ((1, 1), (1, 1), (2, 2), 2)),
    "one visit": ((1, 32, 3, 16, 20, 3), ((1, 1), (0, 0), (1, 1), 1)),
    "transforms": ((2, 32, 10, 20, 12, 5), ((1, 1), (0, 0), (1, 1), 1)),
    "product": ((2, 16, 8, 16, 20, 1), ((1, 1), (0, 0), (1, 1), 1)),
    "small": ((4, 2, 3, 5, 9, 3), ((1, 1), (1, 1), (1, 1), 1)),
}


def given(layer, dtype=torch.float32):
    (visits, batch, channels, outputs, image, size), how = LAYERS[layer]
    shapes = (
        (visits * batch, channels, image, image),
        (visits, outputs, channels // how[3], size, size),
        (visits, outputs),
    )
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
    ], how


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("layer", LAYERS)
def test_convolved_and_pooled(layer, size, dtype, one_core):
    (x, weight, bias), how = given(layer, dtype)
    for plus in (bias, None):
        leaves = [leaf for leaf in (x, weight, plus) if leaf is not None]
        got = convolve_and_pool(x, weight, plus, *how, size)
        expected = F.max_pool2d(on_cpu(x, weight, plus, *how), size)
        slope = torch.randn(got.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert torch.equal(got, expected)
        both = (torch.autograd.grad(out, leaves, slope) for out in (got, expected))
        assert all(
            torch.allclose(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max()))
            for a, b in zip(*both, strict=True)
        )


def test_names_say_which_way_is_tried(one_core):
    for layer in LAYERS:
        (x, weight, _), how = given(layer)
        expected = {"one visit": "grouped", "small": "grouped"}.get(layer, layer.partition(",")[0])
        assert choose_algorithm(x, weight, *how).partition(",")[0] == expected or (
            layer == "transforms" and not available()
        )


@pytest.mark.parametrize("place", [0, 1, 2], ids=["images", "filters", "bias"])
def test_nan_and_infinity_are_not_passed_over(place):
    leaves, how = given("one by one")
    for number in (torch.nan, torch.inf, -torch.inf):
        tensors = [leaf.detach().clone() for leaf in leaves]
        tensors[place][0, 0] = number
        got = convolve_and_pool(*tensors, *how, 2)
        expected = F.max_pool2d(on_cpu(*tensors, *how), 2)
        assert torch.equal(got.isfinite(), expected.isfinite())
        assert not got.isfinite().all()
        assert got[16:].isfinite().all()  # of other visits


@pytest.mark.parametrize(
    ("setting", "close"),
    [
        (lambda: torch.backends.mkldnn.flags(enabled=False), 1e-6),
        (lambda: torch.autograd.set_detect_anomaly(True), 1e-6),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), 0.02),
        (torch.no_grad, 1e-6),
    ],
    ids=["without oneDNN", "looking for nan", "autocast", "without slopes"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:TF32 acceleration")
def test_settings_of_torch(setting, close):
    """Through a whole round, in a model with a layer that is large enough."""
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(32, 1, 28, 28, generator=generator), torch.arange(32) % 3) for _ in range(3)
    ]
    runs = []
    for engine in ("loop", "vector"):
        run = Federation(
            lambda: nn.Sequential(
                nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(1440, 3)
            ),
            FederatedData.from_clients(data),
            FedAvg(lr=0.1),
            modes=1,
            batch_size=32,
            engine=engine,
        )
        with setting():
            list(run.rounds(1))
        runs.append(run.state.modes["theta"].float())
    assert run.engine.fates == ("pool",)
    torch.testing.assert_close(*runs, rtol=0, atol=close)


def test_the_memory_budget_counts_what_is_pooled():
    """Which oneDNN keeps in a layout of its own; at least what goes out of the convolution, by
    images.
    """
    data = FederatedData.from_clients([(torch.randn(200, 1, 28, 28), torch.arange(200) % 3)])
    run = Federation(
        lambda: nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6272, 3)
        ),
        data,
        FedAvg(lr=0.1),
        modes=1,
        batch_size=64,
        engine="vector",
    )
    assert run.engine.fates == ("pool",)
    assert activations(run.engine) >= 64 * 32 * 28 * 28 * 4
