"""Blocks of visits with different numbers of local steps."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedensemble.algorithms import Scaffold
from fedensemble.engines.local.divide_by_length import block_sizes, step_overhead
from fedensemble.testing.toy_problems import small_federation

COUNTS = st.lists(st.integers(1, 60), min_size=1, max_size=24).map(
    lambda counts: sorted(counts, reverse=True)
)


def time_of(counts, sizes, overhead):
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    return sum(counts[first] * (overhead + size) for first, size in zip(firsts, sizes, strict=True))


@given(COUNTS, st.integers(1, 30), st.floats(0, 50))
def test_all_visits_are_in_a_block_and_none_is_too_large(counts, most, overhead):
    sizes = block_sizes(counts, most, overhead)
    assert sum(sizes) == len(counts)
    assert all(0 < size <= most for size in sizes)


@given(COUNTS, st.integers(1, 30), st.floats(0, 50))
def test_dividing_saves_a_tenth_or_is_not_done(counts, most, overhead):
    whole = block_sizes(counts, most, None)
    assert all(size == min(most, len(counts)) for size in whole[:-1])
    sizes = block_sizes(counts, most, overhead)
    saved = 1 - time_of(counts, sizes, overhead) / max(time_of(counts, whole, overhead), 1e-9)
    assert sizes == whole or saved > 0.1 - 1e-9


@given(st.lists(st.integers(1, 60), min_size=8, max_size=8), st.floats(0, 20))
def test_no_division_into_quarters_is_faster(counts, overhead):
    counts = sorted(counts, reverse=True)
    quarters = [[2 * n for n in parts] for parts in ((4,), (3, 1), (1, 3), (2, 2), (1, 1, 2))]
    quarters += [[2 * n for n in parts] for parts in ((1, 2, 1), (2, 1, 1), (1, 1, 1, 1))]
    best = min(time_of(counts, sizes, overhead) for sizes in quarters)
    time = time_of(counts, block_sizes(counts, 8, overhead), overhead)
    assert best <= time <= max(best, best / 0.9)


@given(COUNTS, st.integers(1, 30), st.floats(0, 50))
def test_few_sizes_occur(counts, most, overhead):
    """Each size is captured as a CUDA graph of its own."""
    most = min(most, len(counts))
    piece = -(-most // 4)
    sizes = block_sizes(counts, most, overhead)
    assert all(size == most or size % piece == 0 for size in sizes[:-1])


@pytest.mark.parametrize(("most", "visits"), [(1, 3000), (2, 3000), (4, 6000)])
def test_large_models_have_more_blocks_than_python_allows_nested_calls(most, visits):
    counts = sorted((1 + place % 50 for place in range(visits)), reverse=True)
    sizes = block_sizes(counts, most, overhead=0.1)
    assert sum(sizes) == visits and max(sizes) <= most


def test_a_larger_batch_or_fewer_layers_have_less_overhead():
    small, large = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(*[nn.Linear(4, 4)] * 3)
    assert step_overhead(small, 1, 10**9) < step_overhead(small, 1, 10**8)
    assert step_overhead(small, 1, 10**9) == pytest.approx(0.8)
    assert step_overhead(nn.ModuleList([small, nn.ReLU()]), 1, 10**9) == pytest.approx(1.6)
    assert step_overhead(nn.LSTM(3, 3), 80, 10**9) == pytest.approx(64)
    assert step_overhead(large, 1, 0) > 0  # nothing was counted


def unequal_federation(engine):
    return small_federation(Scaffold(lr=0.1), engine, 2, 2, clients_per_round=6)


def test_divided_rounds_give_the_results_of_a_loop():
    loop, vector = unequal_federation("loop"), unequal_federation("vector")
    vector.engine.step_overhead = 0.1
    trained = []
    train = vector.engine.train
    vector.engine.train = lambda algorithm, inputs, ragged: (
        trained.append(len(inputs.batch_index)),
        train(algorithm, inputs, ragged),
    )[1]
    for _ in range(4):
        one, other = loop.run_round(), vector.run_round()
        assert one.loss == pytest.approx(other.loss, rel=1e-10)
        vector.prefetch_round()  # the first block of the next round
    assert len(trained) > 4 and any(a > b for a, b in pairwise(trained))
    for name, value in loop.state.modes.items():
        torch.testing.assert_close(vector.state.modes[name], value, rtol=1e-10, atol=1e-12)
