"""The Triton kernels against torch in float64, over random shapes; see test_kernels.py for how to
run them.
"""

import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from fedensemble.engines.stacked import aligned_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not INTERPRETED, reason="neither a GPU nor Triton's interpreter"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the interpreter's, of numpy
]
repeatable = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

visits = st.integers(1, 3)
batches = st.integers(1, 4)
channels = st.sampled_from([1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 130])


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


def same(found, error=1e-5):
    for name, a, b in found:
        assert a.shape == b.shape, name
        assert float((a.double() - b).detach().norm()) <= error * float(1e-3 + b.detach().norm()), (
            name
        )


@given(
    visits,
    batches,
    channels,
    channels,
    pairs(1, 9),
    pairs(1, 5),
    pairs(1, 4),
    pairs(0, 6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
@example(1, 1, 16, 16, (1, 1), (1, 1), (3, 2), (0, 0), True, True, False)
# strides beyond the filter, padding, too
@example(2, 1, 17, 33, (2, 7), (1, 2), (4, 3), (5, 0), True, True, False)
# the sum over pixels is split
@example(1, 2, 3, 5, (24, 25), (3, 3), (1, 1), (1, 1), False, True, False)
# more than 128 columns in a tile
@example(1, 1, 130, 130, (3, 2), (2, 2), (2, 1), (1, 1), True, True, True)
@example(2, 3, 65, 16, (9, 8), (2, 3), (1, 2), (1, 0), True, False, False)
@repeatable
def test_convolutions(
    j, batch, inputs, outputs, image, size, stride, padding, biased, direct, halved
):
    from fedensemble.engines.kernels.triton import implicit_gemm
    from fedensemble.engines.kernels.triton.conv import TritonConvolution
    from fedensemble.engines.stacked.stacked_params import StackedParam

    assume(all(i + 2 * p >= s for i, p, s in zip(image, padding, size, strict=True)))
    torch.set_float32_matmul_precision("highest")
    x = numbers(j * batch, inputs, *image).requires_grad_()
    # as filters lie in a matrix of weights
    stored = lying_apart(numbers(j, *size, inputs, outputs, seed=1))
    weight = stored.permute(0, 4, 3, 1, 2).detach().requires_grad_()
    bias = lying_apart(numbers(j, outputs, seed=2)).requires_grad_() if biased else None
    wanted = [tensor for tensor in (x, weight, bias) if tensor is not None]
    param_grads = torch.full((j, stored[0].numel() + 7), 9.0, device=DEVICE)
    place = param_grads[:, 4:-3].unflatten(1, stored.shape[1:]).permute(0, 4, 3, 1, 2)
    piece = StackedParam(weight.detach(), place) if direct else None

    with pytest.MonkeyPatch.context() as patched:
        if halved:  # tiles as for bf16 on a card with few processors
            tiles = implicit_gemm._tiles
            patched.setattr(implicit_gemm, "_MULTIPROCESSORS", 1)
            patched.setattr(
                implicit_gemm, "_tiles", lambda dtype, *shape: tiles(torch.bfloat16, *shape)
            )
        got = TritonConvolution.apply(x, weight, bias, stride, padding, piece)
        back = numbers(*got.shape, seed=3)
        found = list(torch.autograd.grad(got, wanted, back, allow_unused=True))
    exact = [tensor.detach().double().requires_grad_() for tensor in wanted]
    expected = torch.cat(
        [
            F.conv2d(images, exact[1][n], exact[2][n] if biased else None, stride, padding)
            for n, images in enumerate(exact[0].chunk(j))
        ]
    )
    if direct:
        assert found[1] is None
        assert bool((param_grads[:, :4] == 9).all()) and bool((param_grads[:, -3:] == 9).all())
        found[1] = place
    right = torch.autograd.grad(expected, exact, back.double())
    same([("out", got, expected), *zip(("images", "filters", "bias"), found, right, strict=False)])


@given(
    visits,
    st.integers(1, 40),
    channels,
    st.lists(st.integers(1, 6), max_size=3),
    st.sampled_from(["", "relu", "sum"]),
    st.booleans(),
    st.sampled_from([0.0, 50.0]),
)
@example(1, 1, 1, [2], "relu", True, 0.0)
@example(1, 2, 3, [], "", True, 0.0)
@example(1, 17, 8, [64, 63], "relu", True, 50.0)  # more blocks of rows than shares
@example(2, 9, 5, [7], "sum", False, 0.0)
@repeatable
def test_batch_norms(j, batch, many, image, fusion, direct, far):
    from fedensemble.engines.kernels.triton.batch_norm import BatchNorm

    assume(batch * torch.Size(image).numel() >= 2)
    mean, variance = (
        lying_apart(tensor) for tensor in (numbers(j, many, seed=4), numbers(j, many, seed=5).abs())
    )
    means, variances = mean.double(), variance.double()

    def exactly(images, weight, bias, n):
        return F.batch_norm(images, means[n], variances[n], weight, bias, True, 0.3, 1e-2)

    kind = BatchNorm(mean, variance, 1e-2, 0.3)
    known = check_norm(j, batch, many, image, fusion, direct, far, False, kind, exactly)
    same([("mean", known[4], means), ("variance", known[5], variances)], 1e-4 if far else 2e-5)


@given(
    visits,
    st.integers(1, 5),
    st.sampled_from([1, 2, 3, 5, 8, 17, 33]),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.lists(st.integers(1, 6), max_size=3),
    st.sampled_from(["", "relu", "sum"]),
    st.booleans(),
    st.sampled_from([0.0, 50.0]),
    st.booleans(),
)
@example(1, 1, 2, 1, [], "relu", True, 0.0, True)  # nothing but one group's channels
@example(2, 3, 3, 5, [4, 4], "sum", True, 50.0, False)
@example(1, 2, 8, 2, [40, 41], "relu", True, 0.0, True)  # an example's rows in shares
@example(2, 40, 4, 3, [2], "", True, 0.0, False)  # more examples than a program adds up at once
@example(1, 2, 700, 2, [2], "relu", False, 0.0, False)  # more channels than a program takes at once
@example(1, 2, 3, 300, [2], "relu", False, 0.0, True)  # more groups
# several blocks of rows and of channels on one axis
@example(1, 2, 64, 2, [8, 8], "relu", True, 0.0, True)
@repeatable
def test_group_norms(j, batch, each, groups, image, fusion, direct, far, flat):
    from fedensemble.engines.kernels.triton.group_norm import GroupNorm

    assume(each * torch.Size(image).numel() >= 2)

    def exactly(images, weight, bias, n):
        # F.group_norm refuses what it takes for a batch of one
        split = images.unflatten(1, (groups, -1)).flatten(2)
        var, center = torch.var_mean(split, 2, correction=0, keepdim=True)
        normal = ((split - center) / torch.sqrt(var + 1e-2)).reshape(images.shape)
        return normal * weight.reshape(-1, *(1,) * len(image)) + bias.reshape(
            -1, *(1,) * len(image)
        )

    check_norm(
        j, batch, each * groups, image, fusion, direct, far, flat, GroupNorm(groups, 1e-2), exactly
    )


def check_norm(j, batch, many, image, fusion, direct, far, flat, kind, exactly):
    """A norm against `exactly` of one visit's images, weight, bias and number; `flat`: as if there
    were many sets.
    """
    from fedensemble.engines.kernels.triton import norm
    from fedensemble.engines.stacked.stacked_params import StackedParam

    x = (
        far * numbers(1, many, *(1,) * len(image)) + numbers(j * batch, many, *image, seed=1)
    ).requires_grad_()
    weight, bias = (lying_apart(numbers(j, many, seed=seed)) for seed in (2, 3))
    weight.requires_grad_()
    bias.requires_grad_()
    param_grads = torch.full((2, j, many + 7), 9.0, device=DEVICE)
    places = param_grads[:, :, 4:-3]
    pieces = (
        (StackedParam(weight, places[0]), StackedParam(bias, places[1])) if direct else (None, None)
    )
    more = numbers(*x.shape, seed=7).requires_grad_()
    added = more if fusion == "sum" else None
    with pytest.MonkeyPatch.context() as patched:
        if flat:
            patched.setattr(norm, "_MAX_GRID", 0)
        got, known = norm.StackedNorm.apply(x, weight, bias, kind, fusion != "", pieces, added)
        back = numbers(*got.shape, seed=6)
        found = list(torch.autograd.grad(got, (x, weight, bias, more), back, allow_unused=True))
    if direct:
        assert found[1] is found[2] is None
        assert bool((param_grads[:, :, :4] == 9).all()) and bool(
            (param_grads[:, :, -3:] == 9).all()
        )
        found[1:3] = places

    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias, more)]
    expected = torch.cat(
        [exactly(images, exact[1][n], exact[2][n], n) for n, images in enumerate(exact[0].chunk(j))]
    )
    if fusion == "sum":
        expected = expected + exact[3]
    if fusion:  # by our own signs: near 0, rounding decides
        assert bool((got >= 0).all())
        assert bool((expected[got == 0] < 1e-3).all())
        expected = expected * (got > 0)
    right = torch.autograd.grad(expected, exact[: 4 if fusion == "sum" else 3], back.double())
    grads_found = zip(("images", "weight", "bias", "summand"), found, right, strict=False)
    same([("out", got, expected), *grads_found], 1e-4 if far else 2e-5)
    return known


@given(
    st.integers(1, 3),
    channels,
    pairs(1, 14),
    st.integers(1, 14),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
@example(2, 3, (12, 13), 12, 0, False, False)  # places in a square beyond 127
@example(1, 2, (5, 6), 2, 1, False, True)
@repeatable
def test_pooling(n, many, image, size, gap, ties, large):
    from fedensemble.engines.kernels.triton import max_pool

    assume(size <= min(image))
    x = numbers(n, many, *image)
    x = (x.round() if ties else x).requires_grad_()
    with pytest.MonkeyPatch.context() as patched:
        if large:  # as if there were so many pixels that places need 64 bits
            patched.setattr(max_pool, "_LARGE", 0)
        got, expected = (
            max_pool.TritonMaxPool2d.apply(x, size, size + gap),
            F.max_pool2d(x, size, size + gap),
        )
        grad_output = numbers(*expected.shape, seed=1)
        assert torch.equal(got, expected)
        assert torch.equal(
            *(torch.autograd.grad(out, x, grad_output)[0] for out in (got, expected))
        )


def test_pooling_passes_on_what_is_no_number():
    from fedensemble.engines.kernels.triton.max_pool import TritonMaxPool2d

    x = numbers(1, 1, 4, 4)
    x[0, 0, 1, 0], x[0, 0, 2:, 2:] = float("nan"), float("-inf")
    x.requires_grad_()
    got, expected = TritonMaxPool2d.apply(x, 2, 2), F.max_pool2d(x, 2, 2)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    grad_output = numbers(*expected.shape, seed=1)
    assert torch.equal(*(torch.autograd.grad(out, x, grad_output)[0] for out in (got, expected)))


@given(
    visits,
    st.integers(2033, 6200),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([None, torch.float32]),
)
@example(3, 2033, 0.1, torch.float32)  # rows as long as a block
@repeatable
def test_steps(j, length, decay, copied):
    from fedensemble.engines.kernels.triton.sgd_step import sgd_step_

    theta, grad = (
        aligned_rows.empty_aligned(numbers(j, length)).fill_(9)[:, :length] for _ in range(2)
    )
    theta.copy_(numbers(j, length))
    grad.copy_(numbers(j, length, seed=1))
    assert aligned_rows.is_aligned(theta)
    rate = numbers(j, 1, seed=2)
    copy = None if copied is None else aligned_rows.empty_aligned(theta, copied)
    expected = theta.double() - rate * (grad.double() + decay * theta)
    sgd_step_(theta, grad, rate, decay, copy)
    torch.testing.assert_close(theta, expected.float())
    assert copy is None or torch.equal(copy[:, :length], theta)


@given(visits, st.integers(2048, 6200), st.integers(0, 20))
@example(3, 2048, 0)
@repeatable
def test_copies(j, length, wider):
    from fedensemble.engines.kernels.triton.sgd_step import copy_rows

    theta, out = numbers(j, length), torch.full((j, length + wider), 9.0, device=DEVICE)
    copy_rows(theta, out)
    assert torch.equal(out[:, :length], theta)
    assert bool((out[:, length:] == 9).all())


@given(visits, st.integers(2033, 6200))
@example(3, 4096)
@repeatable
def test_copies_of_lines(j, length):
    from fedensemble.engines.kernels.triton.sgd_step import copy_line

    theta = aligned_rows.to_aligned(numbers(j, length))
    out = torch.full((j + 1, theta.stride(0)), 9.0, device=DEVICE)
    copy_line(theta, out[:j])
    assert torch.equal(out[:j, :length], theta)
    assert bool((out[j] == 9).all())


@given(visits, st.integers(1, 4), st.integers(2048, 6200))
@example(3, 2, 4096)  # a multiple of a block
@repeatable
def test_rows_of_modes(j, modes, length):
    from fedensemble.engines.kernels.triton.sgd_step import gather_rows

    source, index = numbers(modes, length), torch.randint(0, modes, (j,), device=DEVICE)
    out = aligned_rows.empty_aligned(numbers(j, length)).fill_(9)
    gather_rows(source, index, out)
    assert torch.equal(out[:, :length], source[index])
    assert bool((out[:, length:] == 0).all())
