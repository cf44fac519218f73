"""Clusters clients by the directions of their updates from one model."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_RESTARTS = 20  # of k-means; the result of the smallest cost counts
_CHUNK = 1 << 16  # columns of the updates that are converted to float64 at once
_EQUAL = 1 - 1e-9  # cosine from which two directions are equal up to rounding


def cluster_updates(changes: Tensor, clusters: int, least: int, seed: int) -> Tensor:
    """The cluster of each client, [J] int64 on the CPU: k-means of the directions of updates.

    Only directions count, because a client with more examples takes more steps, and its update is
    longer: k-means of the updates themselves separates large clients from small ones. Clusters are
    numbered by their first client.

    Args:
        changes: updates of J clients from the same model, [J, P].
        clusters: largest number of clusters.
        least: clients that a cluster must have. Those of smaller clusters are left out, and the
            others are clustered again, into fewer clusters if they are too few; then those left
            out join the cluster with the nearest mean.
        seed: of the random starts of k-means.

    >>> updates = torch.tensor([[1.0, 0.1], [0.0, 2.0], [9.0, 0.0], [0.1, 5.0]])
    >>> cluster_updates(updates, clusters=2, least=1, seed=0).tolist()
    [0, 1, 0, 1]
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    points = _coordinates(_cosines(changes)).numpy()
    inside = torch.arange(len(points))
    while True:
        count = min(clusters, len(inside) // least)
        if count <= 1:
            return torch.zeros(len(points), dtype=torch.int64)
        model = KMeans(count, n_init=_RESTARTS, random_state=seed)
        with warnings.catch_warnings():
            # fewer different directions than clusters: some stay empty, which is what is wanted
            warnings.simplefilter("ignore", ConvergenceWarning)
            label = torch.from_numpy(model.fit(points[inside.numpy()]).labels_).long()
        sizes = torch.bincount(label, minlength=count)
        small = (sizes > 0) & (sizes < least)
        if not bool(small.any()):
            nearest = torch.from_numpy(model.predict(points)).long()
            nearest[inside] = label
            return _number_by_first(nearest)
        # Terminates: one cluster at least has as many clients as the mean, which is `least`.
        inside = inside[~small[label]]


def _cosines(changes: Tensor) -> Tensor:
    """The cosines between updates, [J, J] in float64 on the CPU; 0 with an update of length 0."""
    products = torch.zeros(len(changes), len(changes), dtype=torch.float64, device=changes.device)
    for part in torch.split(changes, _CHUNK, dim=1):
        products += part.double() @ part.double().T
    length = products.diagonal().sqrt()
    unit = torch.where(length > 0, 1 / length, 0)
    return (unit.unsqueeze(1) * products * unit).cpu()


def _coordinates(products: Tensor) -> Tensor:
    """Points [J, J] that have these inner products; k-means needs points, and P may be large."""
    value, vector = torch.linalg.eigh(products)
    points: Tensor = vector * value.clamp(min=0).sqrt()
    # Equal directions get one point. Their own points differ by about 1e-8, the square root of the
    # rounding of an eigenvalue that is zero, and k-means would divide them into spare clusters.
    first = (products > _EQUAL).fill_diagonal_(True).long().argmax(1)
    return points[first]


def _number_by_first(label: Tensor) -> Tensor:
    """The same clusters, numbered 0, 1, ... in the order in which they first occur."""
    seen = list(dict.fromkeys(label.tolist()))
    return torch.tensor([seen.index(value) for value in label.tolist()])
