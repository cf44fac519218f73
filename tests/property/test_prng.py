"""The PRNG: reference values, agreement of integers and tensors, moments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedensemble import prng

# First outputs of splitmix64 from state 0, as in its reference implementation (Vigna,
# splitmix64.c).
KNOWN = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
SIGNED = st.integers(-(2**63), 2**63 - 1)
WORDS = st.integers(0, 2**40)
MANY = 200_000
# The standard error of a mean of n values is sigma / sqrt(n), that of a variance about
# 2 sigma^2 / sqrt(n); six standard errors do not occur by chance.
SIX_SIGMA = 6 / MANY**0.5


def test_splitmix64_known_values():
    assert prng.bits(0, 3).tolist() == [value >> 1 for value in KNOWN]
    assert prng.bits(torch.tensor(0), 3).tolist() == [value >> 1 for value in KNOWN]
    golden = 0x9E3779B97F4A7C15
    for position, value in enumerate(KNOWN, 1):
        assert prng._mix_int(position * golden) == value
        assert int(prng._mix(torch.tensor(position) * prng._GOLDEN)) % 2**64 == value


@settings(max_examples=200, deadline=None)
@given(SIGNED, st.lists(WORDS, min_size=1, max_size=4), st.data())
def test_integer_and_tensor_paths_agree(parent, words, data):
    expected = prng.fold_in(parent, *words)
    assert -(2**63) <= expected < 2**63
    as_tensor = [torch.tensor(word) if data.draw(st.booleans()) else word for word in words]
    assert int(prng.fold_in(parent, *as_tensor)) == expected
    assert int(prng.fold_in(torch.tensor(parent), *words)) == expected
    assert torch.equal(prng.bits(expected, 4), prng.bits(torch.tensor([expected]), 4)[0])


@settings(max_examples=100, deadline=None)
@given(st.integers(-(2**70), 2**70), st.text(max_size=10), WORDS, WORDS)
def test_keys_broadcast(seed, purpose, one, other):
    both = prng.key(seed, purpose, torch.tensor([one, other]))
    assert both.tolist() == [prng.key(seed, purpose, one), prng.key(seed, purpose, other)]


def test_keys_differ_by_seed_purpose_words_and_order():
    keys = {
        prng.key(seed, purpose, a, b)
        for seed in range(8)
        for purpose in "xyz"
        for a in range(8)
        for b in range(8)
    }
    assert len(keys) == 8 * 3 * 8 * 8
    assert prng.key(0, "x", 1) != prng.key(0, "x", 1, 0)
    assert prng.key(0, "x") != prng.key(0, "x", 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SIGNED, st.integers(1, 30)), min_size=1, max_size=8))
def test_permutations_of_different_sizes_in_one_call(rows):
    keys, sizes = torch.tensor([key for key, _ in rows]), torch.tensor([size for _, size in rows])
    orders = prng.permutation(keys, 30, sizes)
    for order, (key, size) in zip(orders, rows, strict=True):
        assert torch.equal(order[:size], prng.permutation(key, size))
        assert sorted(order.tolist()) == list(range(30))
        assert sorted(order[:size].tolist()) == list(range(size))


def test_prefixes_do_not_depend_on_the_count():
    for function in (prng.bits, prng.uniform, prng.normal):
        assert torch.equal(function(5, 100)[:10], function(5, 10))


def test_bits_are_not_negative_and_fair():
    values = prng.bits(prng.key(1, "bits"), MANY)
    assert int(values.min()) >= 0
    fraction = torch.stack([(values >> bit) & 1 for bit in range(63)]).double().mean(1)
    assert float((fraction - 0.5).abs().max()) < 0.5 * SIX_SIGMA


@pytest.mark.parametrize("at", [prng.key(0, "moments"), prng.key(0, "moments", torch.arange(MANY))])
def test_uniform_moments(at):
    # over positions of one key, and over keys
    values = prng.uniform(at, MANY if isinstance(at, int) else 1).flatten()
    assert float(values.min()) > 0
    assert float(values.max()) < 1
    assert abs(float(values.mean()) - 1 / 2) < SIX_SIGMA * (1 / 12) ** 0.5
    assert abs(float(values.var()) - 1 / 12) < SIX_SIGMA * 2 / 12
    # neighbors are uncorrelated
    assert abs(float((values[1:] * values[:-1]).mean()) - 1 / 4) < SIX_SIGMA
    counts = torch.histc(values, bins=50, min=0, max=1)
    assert float(((counts - MANY / 50) ** 2 / (MANY / 50)).sum()) < 49 + 7 * 98**0.5 + 16


def test_normal_moments():
    values = prng.normal(prng.key(0, "normal"), MANY)
    assert bool(values.isfinite().all())
    assert abs(float(values.mean())) < SIX_SIGMA
    assert abs(float(values.var()) - 1) < 2 * SIX_SIGMA
    assert abs(float((values**3).mean())) < 4 * SIX_SIGMA  # var(x^3) = 15
    assert abs(float((values**4).mean()) - 3) < 10 * SIX_SIGMA  # var(x^4) = 96


def test_extreme_bits_give_finite_values():
    lowest, highest = (0 + 0.5) * 2.0**-53, ((1 << 53) - 1 + 0.5) * 2.0**-53
    assert lowest > 0
    assert torch.special.ndtri(torch.tensor([lowest], dtype=torch.float64)).isfinite()
    assert highest <= 1


def test_vmap():
    keys = prng.key(3, "vmap", torch.arange(5))
    for function in (prng.bits, prng.uniform, prng.normal):
        batched = torch.func.vmap(lambda key, f=function: f(prng.fold_in(key, 2), 7))(keys)
        alone = torch.stack([function(prng.fold_in(int(key), 2), 7) for key in keys])
        assert torch.equal(batched, alone)


def test_the_global_generator_is_not_used():
    before = torch.get_rng_state()
    prng.normal(prng.key(0, "x"), 10)
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 <= prng.torch_seed(prng.key(-1, "x")) < 2**63


@settings(max_examples=200, deadline=None)
@given(st.lists(SIGNED, min_size=1, max_size=5), st.lists(WORDS, min_size=1, max_size=3), st.data())
def test_numpy_and_torch_give_the_same_values(parents, words, data):
    parent = torch.tensor(parents).unsqueeze(-1)
    tensors = [
        torch.tensor([word, word + 1]) if data.draw(st.booleans()) else word for word in words
    ]
    drawn = prng.fold_in(parent, *tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prng, "host_array", lambda tensor: None)
        by_torch = prng.fold_in(parent, *tensors)
        bits, uniform = prng.bits(by_torch, 5), prng.uniform(by_torch, 5)
    assert torch.equal(drawn, by_torch)
    assert torch.equal(prng.bits(drawn, 5), bits)
    assert torch.equal(prng.uniform(drawn, 5), uniform)


def test_arguments_are_not_written_to():
    parent, word = torch.tensor([3, 4]), torch.tensor([5, 6])
    prng.bits(prng.fold_in(parent, word), 4)
    assert parent.tolist() == [3, 4]
    assert word.tolist() == [5, 6]
