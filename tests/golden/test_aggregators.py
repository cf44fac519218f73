"""Every robust aggregator against NumPy code written from its paper, and against ByzFL where that
is installed.
"""

import importlib.util
import sys
import types
import warnings

import numpy as np
import pytest
import torch

from fedensemble.core.aggregator import Mean
from fedensemble.robust import (
    CenteredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from fedensemble.robust.upload_attacks import ALIE, IPM, alie_z

CLOSE = 1e-10  # of NumPy in float64
BYZFL = 1e-6
# n clients, f of them malicious, P numbers
SIZES = [(3, 1, 5), (4, 1, 7), (5, 2, 3), (9, 2, 40), (10, 4, 11), (20, 3, 100), (21, 10, 64)]


def vectors(n, f, size, seed=0):
    """Changes of n clients, f of them far away, in no particular order."""
    source = np.random.default_rng([seed, n, f, size])
    found = source.normal(size=(n, size)) * source.uniform(0.5, 2.0, size=(n, 1)) + source.normal(
        size=size
    )
    found[:f] += 10 * source.normal(size=(f, size))
    return source.permutation(found)


def combined(aggregator, x):
    return aggregator.combine({"theta": torch.tensor(x)}, torch.ones(len(x), dtype=torch.float64))[
        "theta"
    ].numpy()


def share(f, n):
    """A share that means exactly f of n clients."""
    return f / n


def numpy_trimmed(x, f):
    return np.array([np.mean(sorted(column)[f : len(column) - f]) for column in x.T])


def numpy_krum_order(x, f):
    n = len(x)
    scores = []
    for i in range(n):
        others = sorted(sum((x[i] - x[j]) ** 2) for j in range(n) if j != i)
        scores.append(np.mean(others[: n - f - 1]))
    return np.argsort(scores, kind="stable")


def numpy_weiszfeld(x, iterations, nu, weight):
    point = np.median(x, axis=0)
    for _ in range(iterations):
        beta = [
            a / max(nu, np.sqrt(sum((row - point) ** 2))) for a, row in zip(weight, x, strict=True)
        ]
        point = sum(b * row for b, row in zip(beta, x, strict=True)) / sum(beta)
    return point


def numpy_clipping(x, tau, iterations):
    center = np.zeros(x.shape[1])
    for _ in range(iterations):
        steps = [(row - center) * min(1, tau / np.linalg.norm(row - center)) for row in x]
        center = center + np.mean(steps, axis=0)
    return center


@pytest.mark.parametrize(("n", "f", "size"), SIZES)
def test_equal_to_numpy(n, f, size):
    x = vectors(n, f, size)
    order = numpy_krum_order(x, f)
    expected = {
        Median(): np.median(x, axis=0),
        TrimmedMean(trim=share(f, n)): numpy_trimmed(x, f),
        Krum(malicious=share(f, n)): x[order[0]],
        MultiKrum(malicious=share(f, n)): x[order[: n - f]].mean(0),
        GeometricMedian(iterations=7, nu=0.1): numpy_weiszfeld(x, 7, 0.1, np.ones(n)),
        CenteredClipping(tau=1.5, iterations=3): numpy_clipping(x, 1.5, 3),
        CenteredClipping(): numpy_clipping(x, sorted(np.linalg.norm(x, axis=1))[(n - 1) // 2], 1),
        Mean(): x.mean(0),
    }
    for aggregator, found in expected.items():
        np.testing.assert_allclose(
            combined(aggregator, x), found, rtol=0, atol=CLOSE, err_msg=str(aggregator)
        )


def test_weights_count_where_they_are_asked_for():
    x = vectors(5, 1, 6)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    tree = {"theta": torch.tensor(x)}

    def found(aggregator):
        return aggregator.combine(tree, weight)["theta"].numpy()

    np.testing.assert_allclose(found(Mean()), weight.numpy() @ x / 15, atol=CLOSE)
    expected = numpy_weiszfeld(x, 10, 1e-6, weight.numpy())
    np.testing.assert_allclose(found(GeometricMedian(weighted=True)), expected, atol=CLOSE)
    chosen = numpy_krum_order(x, 1)[:4]
    weighted = weight.numpy()[chosen] @ x[chosen] / weight.numpy()[chosen].sum()
    np.testing.assert_allclose(found(MultiKrum(malicious=0.2, weighted=True)), weighted, atol=CLOSE)
    np.testing.assert_allclose(
        found(CenteredClipping(tau=1e9, weighted=True)), weight.numpy() @ x / 15, atol=CLOSE
    )
    for aggregator in (
        Median(),
        TrimmedMean(),
        Krum(),
        MultiKrum(),
        GeometricMedian(),
        CenteredClipping(),
    ):
        np.testing.assert_array_equal(found(aggregator), combined(aggregator, x))


def test_the_geometric_median_is_where_the_unit_vectors_cancel():
    x = vectors(9, 2, 12)
    point = combined(GeometricMedian(iterations=500), x)
    units = (x - point) / np.linalg.norm(x - point, axis=1, keepdims=True)
    np.testing.assert_allclose(units.sum(0), 0, atol=1e-8)


def test_the_geometric_median_leaves_a_client_that_sends_nothing():
    x = vectors(7, 0, 5) + 3.0
    x[2] = 0.0
    assert np.linalg.norm(combined(GeometricMedian(), x)) > 1


def test_krum_takes_all_tensors_from_one_client_and_a_small_one_counts():
    """Client 4 is central in the large tensor and malicious in the small one."""
    source = np.random.default_rng(3)
    large, small = 100 * source.normal(size=(7, 20)), source.normal(size=(7, 3))
    large[4], small[4] = large[[0, 1, 2, 3, 5, 6]].mean(0), 50.0
    changes = {"theta": torch.tensor(large), "c": torch.tensor(small)}
    assert Krum().best({"theta": changes["theta"]}, 7, 1).tolist() == [4]
    found = Krum().combine(changes, torch.ones(7))
    [[chosen]] = np.nonzero((large == found["theta"].numpy()).all(1))
    assert chosen != 4
    np.testing.assert_array_equal(found["c"].numpy(), small[chosen])
    assert 4 not in MultiKrum().choose(changes, 7).tolist()


def test_alie_and_ipm_by_hand():
    honest = torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    own = torch.zeros(2, 2, dtype=torch.float64)
    key = torch.zeros(2, dtype=torch.int64)
    np.testing.assert_allclose(ALIE(z=1.5).forge(own, honest, key), [[0.5, -1.0]] * 2)
    np.testing.assert_allclose(IPM(epsilon=0.5).forge(own, honest, key), [[-1.0, -1.0]] * 2)
    assert alie_z(50, 24) == pytest.approx(1.4260768722728479)  # the paper's experiments: 24 of 50
    assert alie_z(10, 2) == pytest.approx(0.0)  # four of eight honest clients must follow


@pytest.fixture(scope="module")
def byzfl():
    """ByzFL's aggregators. Its package imports torchvision and seaborn for a benchmark; its
    aggregators need neither.

    So the package is entered without running its `__init__`: it is installed with `pip install
    --no-deps byzfl`.
    """
    found = importlib.util.find_spec("byzfl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("byzfl is not installed")
    package = types.ModuleType("byzfl")
    package.__path__ = list(found.submodule_search_locations)
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "byzfl"}
    sys.modules["byzfl"] = package
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its docstrings have invalid escapes
        yield importlib.import_module("byzfl.aggregators")
    for name in [name for name in sys.modules if name.split(".")[0] == "byzfl"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("n", "f", "size"), SIZES)
def test_equal_to_byzfl(byzfl, n, f, size, seed):
    x = vectors(n, f, size, seed)
    pairs = [
        (Mean(), byzfl.Average()),
        (Median(), byzfl.Median()),
        (TrimmedMean(trim=share(f, n)), byzfl.TrMean(f=f)),
        (Krum(malicious=share(f, n)), byzfl.Krum(f=f)),
        (MultiKrum(malicious=share(f, n)), byzfl.MultiKrum(f=f)),
        (GeometricMedian(iterations=4000, nu=0.1), byzfl.GeometricMedian(nu=0.1, T=4000)),
        (CenteredClipping(tau=2.0, iterations=1), byzfl.CenteredClipping(L=1, tau=2.0)),
        (CenteredClipping(tau=0.7, iterations=5), byzfl.CenteredClipping(L=5, tau=0.7)),
    ]
    for ours, theirs in pairs:
        np.testing.assert_allclose(
            combined(ours, x), theirs(x), rtol=0, atol=BYZFL, err_msg=str(ours)
        )
