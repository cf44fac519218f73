"""Convolutions with J sets of filters: all ways agree, and a CPU takes the one that the
documentation says.
"""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedensemble.engines.kernels.cpu_conv import (
    choose_algorithm,
    conv2d_cpu,
    grouped_conv,
    per_client_conv,
    pointwise_conv,
)
from fedensemble.engines.stacked import dispatch

SAME = 1e-11  # float64: other orders of sums
PLAIN = ((1, 1), (1, 1), (1, 1), 1)  # stride, padding, dilation, groups
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


def numbers(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).requires_grad_()


def outputs_and_slopes(way, tensors):
    out = way(*tensors)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out, *torch.autograd.grad(out, [t for t in tensors if t is not None], weights)]


def agree(ways, tensors):
    expected, *others = (outputs_and_slopes(way, tensors) for way in ways)
    for found in others:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=SAME, atol=SAME)


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    groups=st.integers(1, 3),
    image=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    size=pairs,
    stride=pairs,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=pairs,
    biased=st.booleans(),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_all_ways_agree(sizes, groups, image, size, stride, padding, dilation, biased):
    visits, batch, channels, outputs = sizes
    assume(all(image[n] + 2 * padding[n] > dilation[n] * (size[n] - 1) for n in (0, 1)))
    tensors = (
        numbers(visits * batch, groups * channels, *image),
        numbers(visits, groups * outputs, channels, *size, seed=1),
        numbers(visits, groups * outputs, seed=2) if biased else None,
    )
    how = (stride, padding, dilation, groups)
    ways = [
        lambda x, w, b: per_client_conv(x, w, b, *how),
        lambda x, w, b: grouped_conv(x, w, *how, b),
        lambda x, w, b: grouped_conv(x, w, *how, b, channels_last=True),
        lambda x, w, b: conv2d_cpu(x, w, b, *how),
        lambda x, w, b: dispatch.conv2d(x, w, b, *how),
    ]
    agree(ways, tensors)


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
    image=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    stride=pairs,
    biased=st.booleans(),
)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_a_product_is_a_convolution_of_single_pixels(sizes, image, stride, biased):
    visits, batch, channels, outputs = sizes
    bias = numbers(visits, outputs, seed=2) if biased else None
    tensors = (
        numbers(visits * batch, channels, *image),
        numbers(visits, outputs, channels, 1, 1, seed=1),
        bias,
    )
    how = (stride, (0, 0), (1, 1), 1)
    agree(
        [
            lambda x, w, b: per_client_conv(x, w, b, *how),
            lambda x, w, b: pointwise_conv(x, w, b, stride),
        ],
        tensors,
    )


def way(
    visits,
    batch,
    channels,
    outputs,
    image,
    size,
    groups=1,
    padding=None,
    dtype=torch.float32,
    stride=1,
    dilation=1,
):
    x = torch.empty(visits * batch, channels, image, image, dtype=dtype, device="meta")
    weight = torch.empty(
        visits, outputs, channels // groups, size, size, dtype=dtype, device="meta"
    )
    beside = size // 2 if padding is None else padding
    return choose_algorithm(
        x, weight, (stride, stride), (beside, beside), (dilation, dilation), groups
    )


@pytest.mark.parametrize(
    ("shape", "other", "expected"),
    [
        ((10, 32, 64, 64, 8, 1), {}, "pointwise"),
        ((1, 1, 3, 4, 8, 1), {"stride": 2}, "pointwise"),
        ((10, 4, 8, 8, 8, 1), {"groups": 2}, "grouped, channels last"),
        ((10, 4, 8, 8, 8, 1), {"padding": 1}, "grouped"),
        ((64, 16, 8, 8, 8, 3), {}, "grouped"),
        ((64, 16, 10, 8, 8, 3), {}, "grouped, channels last"),
        ((64, 16, 8, 10, 8, 3), {}, "grouped, channels last"),
        ((64, 16, 8, 10, 8, 3), {"dtype": torch.float64}, "grouped"),
        ((64, 16, 1, 10, 8, 3), {}, "grouped"),
        ((10, 4, 20, 20, 8, 3), {"groups": 20}, "grouped"),
        ((10, 32, 1, 10, 28, 5), {"padding": 0}, "per client"),
        ((10, 32, 10, 20, 12, 5), {"padding": 0}, "per client"),
        ((2, 16, 64, 64, 32, 3), {}, "per client"),
        ((1, 16, 64, 64, 32, 3), {}, "grouped"),
        ((2, 1, 32, 32, 32, 3), {}, "grouped"),  # 2^16 numbers
        ((2, 1, 32, 40, 32, 3), {}, "per client"),
        ((2, 1, 32, 128, 32, 3), {"stride": 2}, "grouped"),
        ((1, 32, 10, 20, 12, 5), {"padding": 0}, "grouped, channels last"),
        ((10, 4, 10, 20, 12, 5), {"padding": 0}, "grouped, channels last"),  # few numbers
        ((10, 64, 10, 20, 12, 5), {"padding": 0, "stride": 2}, "per client"),
        ((10, 32, 10, 20, 12, 5), {"padding": 5}, "per client"),
        ((10, 64, 10, 20, 12, 5), {"padding": 0, "dilation": 2}, "per client"),
        ((10, 32, 10, 20, 12, 5), {"padding": 0, "groups": 2}, "per client"),
        ((10, 32, 10, 20, 12, 5), {"padding": 0, "dtype": torch.float64}, "per client"),
        ((10, 32, 10, 20, 24, 3), {"padding": 0}, "per client"),
        ((10, 32, 16, 32, 14, 5), {}, "per client"),  # channels fill blocks
        ((10, 32, 16, 32, 28, 9), {}, "per client"),
        ((10, 32, 16, 32, 40, 17), {}, "per client"),
    ],
)
def test_ways_are_chosen_by_shape(shape, other, expected):
    """Visits, batch, channels, outputs, sides of images and of filters."""
    assert way(*shape, **other) == expected


@pytest.mark.parametrize("channels", [8, 6, 1])
@pytest.mark.parametrize("visits", [1, 3])
def test_outputs_may_be_written_into(channels, visits):
    """As by nn.ReLU(inplace=True)."""
    tensors, how = (
        (numbers(visits * 2, channels, 5, 5), numbers(visits, 4, channels, 3, 3, seed=1)),
        PLAIN,
    )
    agree(
        [
            lambda x, w: per_client_conv(x, w, None, *how).relu(),
            lambda x, w: conv2d_cpu(x, w, None, *how).relu_(),
        ],
        tensors,
    )


def test_repeated_filters_never_need_more_memory_than_the_images():
    """32 images a visit with 512 x 512 filters: repeated for each, they would be 16 times the
    images.
    """
    x, weight = numbers(64, 512, 4, 4), numbers(2, 512, 512, 1, 1, seed=1)
    saved = 0

    def seen(tensor):
        nonlocal saved
        saved = max(saved, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        conv2d_cpu(x, weight, None, (1, 1), (0, 0), (1, 1), 1)
    assert saved <= max(x.numel(), weight.numel())
