"""Clusters of updates: k-means of directions, against all partitions."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedensemble.algorithms.personal.update_clusters import cluster_updates


def unit(points):
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def cost(points, label):
    groups = [points[np.asarray(label) == k] for k in set(label)]
    return sum(((group - group.mean(0)) ** 2).sum() for group in groups)


@pytest.mark.parametrize("seed", range(6))
def test_the_partition_is_the_best_of_all(seed):
    changes = np.random.default_rng(seed).normal(size=(7, 5))
    label = cluster_updates(torch.tensor(changes), 3, 1, seed=seed).tolist()
    best = min(cost(unit(changes), each) for each in itertools.product(range(3), repeat=7))
    assert cost(unit(changes), label) == pytest.approx(best)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 5), st.integers(1, 4))
def test_properties(seed, clients, clusters, least):
    rng = np.random.default_rng(seed)
    changes = rng.normal(size=(clients, 6))
    label = cluster_updates(torch.tensor(changes), clusters, least, seed=seed)
    assert label.shape == (clients,)
    sizes = torch.bincount(label)
    assert len(sizes) <= min(clusters, max(clients // least, 1))
    assert len(sizes) == 1 or int(sizes.min()) >= least
    first = [label.tolist().index(k) for k in range(len(sizes))]
    assert first == sorted(first)  # clusters are numbered by their first client
    longer = changes * rng.uniform(0.01, 100, size=(clients, 1))
    again = cluster_updates(torch.tensor(longer), clusters, least, seed=seed)
    assert cost(unit(changes), again.tolist()) == pytest.approx(
        cost(unit(changes), label.tolist()), abs=1e-9
    )


def test_lonely_clients_join_the_nearest_cluster():
    """Without the first client, which is like no other, there are two clusters of three."""
    groups = [[1, 0, 0, 0]] * 3 + [[0, 1, 0, 0]] * 3
    changes = torch.tensor([[0.3, 0, 5, 0], *groups]).double()
    changes[1:, 3] = torch.tensor([0.1, 0.0, -0.1, 0.1, 0.0, -0.1])
    assert cluster_updates(changes, 3, 1, seed=0).tolist() == [0, 1, 1, 1, 2, 2, 2]
    assert cluster_updates(changes, 2, 2, seed=0).tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_updates_of_length_zero_and_equal_updates():
    assert cluster_updates(torch.zeros(4, 3), 2, 1, seed=0).tolist() == [0] * 4
    same = torch.tensor([[1.0, 2.0]]).expand(5, 2)
    assert set(cluster_updates(same, 3, 1, seed=0).tolist()) <= {0, 1}
    still = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 0.0]])
    assert cluster_updates(still, 2, 1, seed=0).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("directions", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_equal_directions_are_not_divided_into_spare_clusters(directions, seed):
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(9) % directions
    lengths = 1 + torch.rand(9, 1, generator=generator)
    changes = torch.randn(directions, 50, generator=generator)[group] * lengths
    assert cluster_updates(changes, clusters=4, least=1, seed=seed).tolist() == group.tolist()
