"""Compressors: unbiased, within their variance, and exact as bytes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedensemble import prng
from fedensemble.algorithms.compressed.compressors import Dither, RandK, TopK

dithers = st.builds(
    Dither,
    block=st.integers(1, 40),
    norm=st.sampled_from(["2", "inf"]),
    levels=st.sampled_from([1, 2, 3, 7, 127]),
)
shares = st.floats(0.01, 1.0)
unbiased = dithers | st.builds(RandK, shares)
quantizers = unbiased | st.builds(TopK, shares)
sizes = st.integers(1, 100)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.float64])
scales = st.sampled_from([1e-30, 1e-6, 1.0, 1e12])
DRAWS = 3000


def vector(seed, size, dtype=torch.float64, scale=1.0):
    """Normal numbers, a third of them zero, of both signs."""
    x = prng.normal(prng.key(seed, "x"), size) * (prng.uniform(prng.key(seed, "zero"), size) > 0.33)
    return (scale * x).to(dtype)


def compressed(compressor, x, seed, count):
    uniform = prng.uniform(prng.key(seed, "u"), count * len(x)).reshape(count, -1).to(x.dtype)
    return compressor.compress(x.expand(count, -1), uniform)


def bits(x):
    return x.view(torch.uint8).tolist()


@given(quantizers, sizes, seeds, dtypes, scales)
@settings(max_examples=200, deadline=None)
def test_round_trip_and_length(compressor, size, seed, dtype, scale):
    for x in compressed(compressor, vector(seed, size, dtype, scale), seed, 3):
        message = compressor.encode(x)
        assert len(message) == compressor.bytes(size, dtype.itemsize)
        assert bits(compressor.decode(message, size, dtype)) == bits(x)


@given(st.binary(min_size=8, max_size=400), dithers | st.builds(RandK, shares))
@settings(max_examples=100, deadline=None)
def test_round_trip_of_any_float32(raw, compressor):
    x = torch.frombuffer(bytearray(raw[: len(raw) // 4 * 4]), dtype=torch.float32)
    x = x.nan_to_num(0.0, 0.0, 0.0).clamp(-1e30, 1e30)
    x = torch.where(x.abs() < 1e-30, 0, x)  # subnormal units have fewer bits than levels need
    out = compressed(compressor, x, len(raw), 1)[0]
    assert bits(compressor.decode(compressor.encode(out), len(x))) == bits(out)


@given(unbiased, sizes, seeds)
@settings(max_examples=30, deadline=None)
def test_right_on_average_and_within_omega(compressor, size, seed):
    x = vector(seed, size)
    drawn = compressed(compressor, x, seed, DRAWS)
    # The mean of n draws is off by omega ||x||^2 / n at most, squared and on average: five times
    # its root is far out.
    bound = compressor.omega(size) * float(x.square().sum())
    assert float((drawn.mean(0) - x).square().sum()) <= 25 * bound / DRAWS + 1e-20
    distance = (drawn - x).square().sum(1)
    assert float(distance.mean() - 6 * distance.std() / DRAWS**0.5) <= bound + 1e-12


@given(st.builds(TopK, shares), sizes, seeds)
@settings(max_examples=50, deadline=None)
def test_top_k_keeps_the_largest(compressor, size, seed):
    x = vector(seed, size)
    out = compressed(compressor, x, seed, 1)[0]
    kept = out != 0
    assert int(kept.sum()) <= compressor.num_kept(size)
    assert torch.equal(out[kept], x[kept])
    assert (
        float((out - x).square().sum()) <= compressor.omega(size) * float(x.square().sum()) + 1e-12
    )


@given(quantizers, sizes, seeds, st.sampled_from([0.5, 4.0]))
@settings(max_examples=50, deadline=None)
def test_scales_with_its_input(compressor, size, seed, factor):
    """So that the units of what is compressed do not matter: a gradient, or the rate times it."""
    x = vector(seed, size)
    once, scaled = compressed(compressor, x, seed, 1), compressed(compressor, factor * x, seed, 1)
    assert torch.equal(factor * once, scaled)


@given(quantizers, sizes, seeds)
@settings(max_examples=50, deadline=None)
def test_alone_and_among_others(compressor, size, seed):
    x = torch.stack([vector(seed + k, size) for k in range(3)])
    uniform = prng.uniform(prng.key(seed, "u"), 3 * size).reshape(3, size)
    together = compressor.compress(x, uniform)
    for k in range(3):
        assert torch.equal(compressor.compress(x[k], uniform[k]), together[k])


@given(quantizers, sizes)
@settings(max_examples=50, deadline=None)
def test_zero_stays_zero(compressor, size):
    zero = torch.zeros(size)
    assert torch.equal(compressor.compress(zero, torch.full((size,), 1e-9)), zero)


def test_real_savings():
    """A model of a million weights: 4 MB as floats."""
    assert Dither(256).bytes(1_000_000) == 3907 * 4 + 200_000  # 19 times less
    assert Dither(256, levels=7).bytes(1_000_000) == 3907 * 4 + 500_000
    assert RandK(0.01).bytes(1_000_000) == 10_000 * (4 + 3)  # values and places
    assert RandK(0.1).bytes(1_000_000) == 100_000 * 4 + 125_000  # values and a bit for every entry


def test_ternary_bound_is_attained():
    """||x||_1 ||x||_inf = (1 + sqrt d) / 2 ||x||^2 where one entry is 1 and the others 1 / (1 +
    sqrt d).
    """
    d = 16
    x = torch.full((d,), 1 / (1 + d**0.5), dtype=torch.float64)
    x[0] = 1.0
    exact = float(x.sum() * x.max() - x.square().sum()) / float(x.square().sum())
    assert abs(exact - Dither(block=d).omega(d)) < 1e-12
