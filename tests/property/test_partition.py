"""Every partition, for random numbers of clients, classes and class sizes."""

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedensemble.data import Dataset, partition, partitions
from fedensemble.data.partitioning.class_partition import class_quotas

FAST = settings(max_examples=60, deadline=None)
SEEDS = st.integers(0, 2**40)
CLASS_SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(
    lambda sizes: sum(sizes) > 0
)


def source_of(sizes, seed=0):
    """A source with so many rows of each class, in random order; the input is the row's number."""
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return Dataset(
        np.arange(len(labels), dtype=np.float32).reshape(-1, 1), labels, classes=len(sizes)
    )


def rows_of(name, source, clients, seed, **options):
    """The rows of each client; raises if a row is given out twice."""
    data = partition(source, name, clients, seed, **options)
    rows = [data.client(index)[0].flatten().long().numpy() for index in range(len(data))]
    every = np.concatenate(rows)
    assert len(np.unique(every)) == len(every)
    assert np.array_equal(data.y.numpy(), np.asarray(source.y)[every])
    assert all((np.diff(part) > 0).all() for part in rows)
    return rows


def same(one, other):
    return len(one) == len(other) and all(
        np.array_equal(a, b) for a, b in zip(one, other, strict=True)
    )


@FAST
@given(n=st.integers(1, 200), clients=st.integers(1, 50), seed=SEEDS)
def test_even_partitions(n, clients, seed):
    assume(clients <= n)
    source = source_of([n])
    for name in ("iid", "contiguous"):
        rows = rows_of(name, source, clients, seed)
        sizes = [len(part) for part in rows]
        assert sum(sizes) == n
        assert len(rows) == clients
        assert max(sizes) - min(sizes) <= 1
    assert np.array_equal(np.concatenate(rows), np.arange(n))  # contiguous keeps the order


@FAST
@given(sizes=CLASS_SIZES, clients=st.integers(1, 30), wanted=st.integers(1, 12), seed=SEEDS)
def test_classes_gives_exactly_so_many(sizes, clients, wanted, seed):
    counts = np.array([size for size in sizes if size])
    assume(wanted <= len(counts) <= clients * wanted <= np.minimum(counts, clients).sum())
    source = source_of(sizes)
    rows = rows_of("classes", source, clients, seed, classes_per_client=wanted)
    assert len(rows) == clients
    assert sum(len(part) for part in rows) == len(source)
    table = np.stack([np.bincount(source.y[part], minlength=len(sizes)) for part in rows])
    assert ((table > 0).sum(1) == wanted).all()
    for label, size in enumerate(sizes):
        shares = table[table[:, label] > 0, label]
        assert size == 0 or shares.max() - shares.min() <= 1


@settings(FAST, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=30),
    clients=st.integers(1, 500),
    wanted=st.integers(1, 30),
)
def test_quotas_are_proportional_within_bounds(sizes, clients, wanted):
    sizes = np.array(sizes)
    most = np.minimum(sizes, clients)
    assume(wanted <= len(sizes) <= clients * wanted <= most.sum())
    quota = class_quotas(sizes, clients, wanted)
    assert quota.sum() == clients * wanted
    assert (quota >= 1).all()
    assert (quota <= most).all()
    # Where no bound is met, quotas are proportional to within the rounding.
    free = (quota > 1) & (quota < most)
    if free.any():
        low, high = ((quota[free] - 1) / sizes[free]).max(), ((quota[free] + 1) / sizes[free]).min()
        assert low <= high
    order = np.argsort(sizes, kind="stable")
    assert (np.diff(quota[order]) >= -1).all()


@FAST
@given(
    sizes=CLASS_SIZES,
    clients=st.integers(1, 30),
    concentration=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 100.0, 1e6]),
    least=st.integers(1, 4),
    seed=SEEDS,
)
def test_uneven_partitions_leave_nobody_short(sizes, clients, concentration, least, seed):
    source = source_of(sizes)
    assume(clients * least <= len(source))
    for name, option in (("dirichlet", "alpha"), ("quantity", "beta")):
        rows = rows_of(name, source, clients, seed, min_examples=least, **{option: concentration})
        assert len(rows) == clients
        assert sum(len(part) for part in rows) == len(source)
        assert min(len(part) for part in rows) >= least


@FAST
@given(
    groups=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    least=st.integers(1, 4),
    seed=SEEDS,
    data=st.data(),
)
def test_natural_keeps_groups_whole(groups, least, seed, data):
    groups = np.array(groups)
    source = Dataset(
        np.arange(len(groups), dtype=np.float32).reshape(-1, 1), np.zeros(len(groups)), group=groups
    )
    kept = [label for label in np.unique(groups) if (groups == label).sum() >= least]
    assume(kept)
    every = rows_of("natural", source, None, seed, min_examples=least)
    assert same(every, [np.flatnonzero(groups == label) for label in kept])
    count = data.draw(st.integers(1, len(kept)))
    some = rows_of("natural", source, count, seed, min_examples=least)
    assert len(some) == count
    assert {tuple(part) for part in some} <= {tuple(part) for part in every}


OPTIONS = {
    "iid": {},
    "contiguous": {},
    "classes": {"classes_per_client": 2},
    "dirichlet": {"alpha": 0.5},
    "quantity": {"beta": 0.5},
    "natural": {},
}


@settings(FAST, max_examples=20)
@given(seed=SEEDS)
def test_the_seed_decides(seed):
    made = source_of([40, 30, 50])
    source = Dataset(made.x, made.y, classes=3, group=np.arange(120) // 4)
    for name in (name for name in partitions if name in OPTIONS):
        one, again, other = (
            rows_of(name, source, 10, s, **OPTIONS[name]) for s in (seed, seed, seed + 1)
        )
        assert same(one, again)
        assert same(one, other) == (name == "contiguous")
