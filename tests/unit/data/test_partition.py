"""`partition`: the fields it passes on, and the errors for impossible divisions."""

import itertools
import zlib

import numpy as np
import pytest
import torch

from fedensemble.data import Dataset, Standardise, load, partition, partitions
from fedensemble.errors import InputError


@pytest.fixture
def source():
    """Twelve rows with their number as input; four natural clients have 1, 2, 3 and 6 rows."""
    return Dataset(
        np.arange(12, dtype=np.float32).reshape(12, 1),
        np.arange(12) % 3,
        np.zeros((2, 1), np.float32),
        np.array([0, 1]),
        classes=3,
        standardise=Standardise((0.0,), (2.0,)),
        group=np.array([3, 3, 3, 3, 3, 3, 2, 2, 2, 1, 1, 0]),
        group_names=("one", "two", "three", "six"),
        info={"source": "mine", "files": []},
    )


def test_carries_everything(source):
    data = partition(source, "dirichlet", clients=3, seed=5, alpha=1.0)
    assert data.standardise is source.standardise
    assert data.classes == 3
    assert data.y_test.tolist() == [0, 1]
    assert data.info == {
        "source": "mine",
        "files": [],
        "partition": "dirichlet",
        "partition_seed": 5,
        "options": {"alpha": 1.0},
    }
    for client in range(3):
        rows = data.client(client)[0].flatten().long()
        assert torch.equal(rows, rows.sort().values)
        assert torch.equal(rows % 3, data.client(client)[1])


def test_natural_clients(source):
    data = partition(source, "natural")
    assert data.names == ("one", "two", "three", "six")
    assert data.client(3)[0].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert partition(source, "natural", min_examples=2).names == ("two", "three", "six")
    chosen = [
        set(partition(source, "natural", clients=count, seed=2).names) for count in (1, 2, 3, 4)
    ]
    assert all(fewer < more for fewer, more in itertools.pairwise(chosen))
    with pytest.raises(
        InputError, match=r"2 natural clients with at least 3 examples \(4 in all\); got clients=3"
    ):
        partition(source, "natural", clients=3, min_examples=3)


def test_known_partitions():
    assert {"iid", "classes", "dirichlet", "quantity", "natural", "contiguous"} <= set(partitions)


@pytest.mark.parametrize(
    ("name", "clients", "options", "problem"),
    [
        ("idd", 2, {}, "unknown partition 'idd': did you mean 'iid'"),
        ("iid", 2, {"alpha": 1}, "partition 'iid' takes no options; got 'alpha'"),
        ("dirichlet", 2, {"alhpa": 1}, "'alhpa': did you mean 'alpha'"),
        ("classes", 2, {}, "needs the option 'classes_per_client'"),
        ("iid", None, {}, "needs a number of clients"),
        ("iid", 13, {}, "got clients=13 and 12 examples. Lower clients to 12"),
        ("iid", 0, {}, "clients to be an integer >= 1; got clients=0"),
        ("iid", 2.5, {}, "got clients=2.5"),
        ("iid", True, {}, "got clients=True"),
        ("dirichlet", 4, {"min_examples": 4}, "Lower clients to 3 or less, or lower min_examples"),
        ("dirichlet", 4, {"alpha": 0}, "alpha to be a finite number above 0; got alpha=0"),
        ("dirichlet", 4, {"alpha": "many"}, "got alpha='many'"),
        ("quantity", 4, {"beta": float("nan")}, "got beta=nan"),
        ("quantity", 4, {"min_examples": 0}, "min_examples"),
        (
            "classes",
            4,
            {"classes_per_client": 4},
            "classes_per_client <= the 3 classes.*Lower classes_per_client",
        ),
        ("classes", 1, {"classes_per_client": 2}, "at least the 3 classes .*Raise either"),
        ("classes", 12, {"classes_per_client": 2}, "24 pairs .* only 12 .*Lower clients"),
        ("classes", 4, {"classes_per_client": 0}, "integer >= 1"),
    ],
)
def test_impossible_divisions(source, name, clients, options, problem):
    with pytest.raises(InputError, match=problem):
        partition(source, name, clients, **options)


def test_bad_seed(source):
    with pytest.raises(InputError, match="seed"):
        partition(source, "iid", 2, seed=-1)


@pytest.mark.parametrize("name", ["iid", "quantity", "contiguous"])
def test_sequences_can_be_divided(name):
    tokens = np.arange(40).reshape(10, 4)
    data = partition(Dataset(tokens, tokens + 1, classes=41), name, clients=3)
    assert int(data.size.sum()) == 10
    assert torch.equal(data.x + 1, data.y)


@pytest.mark.parametrize(
    ("name", "options"), [("classes", {"classes_per_client": 1}), ("dirichlet", {})]
)
def test_sequences_have_no_label(name, options):
    tokens = np.zeros((10, 4), np.int64)
    with pytest.raises(InputError, match=r"targets of shape \(10, 4\).*cannot be divided by label"):
        partition(Dataset(tokens, tokens), name, clients=3, **options)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([[0, 1], [1]], "twice"),
        ([[0], [12]], "not among"),
        ([[0], []], "client 1"),
        ([], "no clients"),
    ],
)
def test_partitions_from_outside_are_checked(source, rows, problem, monkeypatch):
    monkeypatch.setitem(
        partitions._items, "mine", lambda source, clients, seed: [np.array(r, int) for r in rows]
    )
    with pytest.raises(InputError, match=problem):
        partition(source, "mine", 2)


def test_classes_are_mixed():
    """All pairs of four classes are about equally frequent, unlike in the greedy start."""
    counts = np.zeros((4, 4))
    source = load("gaussians", n=48, classes=4)
    for seed in range(150):
        has = (
            partition(source, "classes", 8, seed=seed, classes_per_client=2).label_counts() > 0
        ).double()
        counts += (has.T @ has).numpy()
    pairs = counts[np.triu_indices(4, 1)]
    assert pairs.sum() == 150 * 8
    # 200 of each pair are expected, with a standard deviation of about 10
    assert np.abs(pairs / 200 - 1).max() < 0.2


def test_division_is_the_same_on_every_machine():
    """The random generator depends only on the seed and the name of the partition."""
    data = partition(
        Dataset(np.arange(8.0).reshape(8, 1), np.zeros(8, int)), "iid", clients=2, seed=7
    )
    expected = np.random.default_rng([7, zlib.crc32(b"partition/iid")]).permutation(8)[:4]
    assert data.client(0)[0].flatten().tolist() == sorted(expected)


def test_classes_of_a_single_client_are_noted():
    x = np.zeros((6, 1))
    y = np.array(["a", "b", "a", "b", "c", "a"])
    source = Dataset(x, y, group=np.array([0, 0, 1, 1, 1, 2]), group_names=("n", "s", "w"))
    (note,) = partition(source, "natural").notes
    assert note.startswith("1 of 3 classes occur at a single client: 'c' ('s'). A mode learns")
    assert not partition(source, "iid", 3).notes
    everywhere = Dataset(x, np.array([0, 1] * 3), group=np.array([0, 0, 1, 1, 2, 2]))
    assert not partition(everywhere, "natural").notes
    one = Dataset(x, y, group=np.zeros(6, np.int64))
    assert not partition(one, "natural").notes
    regression = Dataset(x, np.arange(6.0), group=np.array([0, 0, 1, 1, 1, 2]))
    assert not partition(regression, "natural").notes
    apart = Dataset(x, np.arange(6), group=np.array([0, 0, 1, 1, 1, 2]))
    assert "0 (0), 1 (0), 2 (1) and 3 more" in partition(apart, "natural").notes[0]
