"""Partitions with Dirichlet shares: of each class (`dirichlet`), or of all rows (`quantity`)."""

import heapq
from typing import Any

import numpy as np

from ...arguments import require_positive
from ..dataset import Dataset, Rows, make_rng
from .partition import check_client_count, partitions, rows_by_class


@partitions.register("dirichlet")
def dirichlet(
    source: Dataset, clients: int | None, seed: int, alpha: float = 0.5, min_examples: int = 1
) -> list[Rows]:
    """Label-Dirichlet (Hsu, Qi and Brown, 2019): client shares of each class ~ Dirichlet(alpha).

    Args:
        alpha: concentration; with a smaller value a client has fewer classes.
        min_examples: clients with fewer examples get some from the largest clients.
    """
    labels = source.labels()
    count = check_client_count("dirichlet", source, clients, min_examples)
    alpha = require_positive("Partition 'dirichlet'", "alpha", alpha)
    rng = make_rng(seed, "partition/dirichlet")
    owner = np.empty(len(labels), np.int64)
    for rows in rows_by_class(labels):
        points = split_points(dirichlet_shares(rng, alpha, count), len(rows))
        sizes = np.diff(points, prepend=0, append=len(rows))
        owner[rng.permutation(rows)] = np.repeat(np.arange(count), sizes)
    ends = np.cumsum(np.bincount(owner, minlength=count))
    return top_up_clients(np.split(np.argsort(owner, kind="stable"), ends[:-1]), min_examples, rng)


@partitions.register("quantity")
def quantity(
    source: Dataset, clients: int | None, seed: int, beta: float = 0.5, min_examples: int = 1
) -> list[Rows]:
    """Clients of different sizes: shares of the rows ~ Dirichlet(beta), rows chosen at random.

    Args:
        beta: concentration; with a smaller value the sizes differ more.
        min_examples: clients with fewer examples get some from the largest clients.
    """
    count = check_client_count("quantity", source, clients, min_examples)
    rng = make_rng(seed, "partition/quantity")
    shares = dirichlet_shares(rng, require_positive("Partition 'quantity'", "beta", beta), count)
    rows = np.split(rng.permutation(len(source)), split_points(shares, len(source)))
    return top_up_clients(rows, min_examples, rng)


def dirichlet_shares(
    rng: np.random.Generator, concentration: float, count: int
) -> np.ndarray[Any, Any]:
    """Returns shares ~ Dirichlet(concentration, ..., concentration), [count], with sum 1."""
    shares = rng.dirichlet(np.full(count, concentration))
    if not np.isfinite(shares).all() or abs(shares.sum() - 1) > 1e-6:
        # For a concentration below about 1e-3 all gamma variates can underflow to 0, which gives
        # nan. The limit of the distribution is one random client with everything.
        shares = np.eye(1, count, int(rng.integers(count)))[0]
    return shares


def split_points(shares: np.ndarray[Any, Any], n: int) -> Rows:
    """Returns where to split n rows into pieces with these shares, rounded, [len(shares) - 1]."""
    points: Rows = np.clip(np.rint(np.cumsum(shares)[:-1] * n), 0, n).astype(np.int64)
    return points


def top_up_clients(rows: list[Rows], least: int, rng: np.random.Generator) -> list[Rows]:
    """Returns the rows per client, after moving rows to clients that have fewer than `least`.

    Each moved row comes from the client that is the largest at that time.
    """
    if min(len(part) for part in rows) >= least:
        return rows
    parts = [list(rng.permutation(part)) for part in rows]
    # A heap of (-size, client), because heapq pops the smallest item.
    largest = [(-len(part), client) for client, part in enumerate(parts) if len(part) > least]
    heapq.heapify(largest)
    for part in parts:
        while len(part) < least:
            negative_size, donor = heapq.heappop(largest)
            part.append(parts[donor].pop())
            if -negative_size - 1 > least:
                heapq.heappush(largest, (negative_size + 1, donor))
    return [np.array(part, np.int64) for part in parts]
