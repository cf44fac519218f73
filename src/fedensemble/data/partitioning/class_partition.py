"""The partition `classes`: every client has exactly C classes."""

import numpy as np

from ...arguments import require_integer
from ...errors import InputError
from ..dataset import Dataset, Rows, make_rng
from .partition import check_client_count, partitions, rows_by_class

# Number of swaps that are tried per class of a client. The assignment is well mixed before that.
SWEEPS_PER_CLASS = 20


@partitions.register("classes")
def classes(source: Dataset, clients: int | None, seed: int, classes_per_client: int) -> list[Rows]:
    """Every client has examples of exactly C distinct classes, and every example has a client.

    The number of clients that share a class is proportional to the size of the class, and its
    examples are divided evenly among them. Which client gets which classes is a random bipartite
    graph with these degrees.

    Args:
        classes_per_client: number of classes of each client, C.
    """
    owner = "Partition 'classes'"
    per_client = require_integer(owner, "classes_per_client", classes_per_client, minimum=1)
    count = check_client_count("classes", source, clients)
    by_class = rows_by_class(source.labels())
    quota = class_quotas(np.array([len(rows) for rows in by_class]), count, per_client)
    rng = make_rng(seed, "partition/classes")
    classes_of = deal_classes(quota, count, per_client, rng)
    classes_of = mix_classes(classes_of, len(by_class), rng)
    parts: list[list[Rows]] = [[] for _ in range(count)]
    # the clients of class 0, then those of class 1, ...
    order = np.argsort(classes_of.ravel(), kind="stable") // per_client
    for rows, owners in zip(by_class, np.split(order, np.cumsum(quota)[:-1]), strict=True):
        # Both permutations are needed. The first makes a piece a random sample of the class. The
        # second chooses at random which clients get one example more.
        pieces = np.array_split(rng.permutation(rows), len(owners))
        for client, piece in zip(rng.permutation(owners), pieces, strict=True):
            parts[client].append(piece)
    return [np.concatenate(part) for part in parts]


def class_quotas(sizes: Rows, clients: int, per_client: int) -> Rows:
    """Returns the number of clients of each class, proportional to `sizes`, N C in total.

    Each number is at least 1 and at most min(clients, size of the class).

    Args:
        sizes: number of examples per class.
        clients: number of clients, N.
        per_client: number of classes per client, C.

    >>> class_quotas(np.array([100, 100, 50]), clients=5, per_client=1)
    array([2, 2, 1])
    """
    most = np.minimum(sizes, clients)
    total = clients * per_client
    got = f"got clients={clients}, classes_per_client={per_client}"
    if per_client > len(sizes):
        raise InputError(
            f"Partition 'classes' needs classes_per_client <= the {len(sizes)} classes in the "
            f"data; {got}. Lower classes_per_client."
        )
    if total < len(sizes):
        raise InputError(
            "Partition 'classes' gives every example to a client, so clients x classes_per_client "
            f"must be at least the {len(sizes)} classes in the data; {got}. Raise either."
        )
    if total > most.sum():
        raise InputError(
            f"Partition 'classes' needs {total} pairs of a client and a class, but the classes "
            f"have examples for only {most.sum()} (the smallest class has {sizes.min()}); {got}. "
            "Lower clients or classes_per_client."
        )
    # Without bounds the quotas would be scale * sizes with scale = total / sizes.sum(). With
    # bounds, bisect for the scale at which the bounded quotas add up to the total.
    low, high = 0.0, float(total)
    for _ in range(200):
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(scale * sizes, 1, most).sum() < total else (low, scale)
    exact = np.clip(high * sizes, 1, most)
    quota: Rows = np.floor(exact).astype(np.int64)
    # Round by the method of the largest remainder. A class at its upper bound sorts last.
    raised = np.argsort(np.where(quota < most, quota - exact, 1), kind="stable")[
        : total - quota.sum()
    ]
    quota[raised] += 1
    return quota


def deal_classes(quota: Rows, clients: int, per_client: int, rng: np.random.Generator) -> Rows:
    """Returns the classes of each client, [N, C], such that class c has `quota[c]` clients.

    Each client in turn takes the C classes with the largest remaining quotas, with random ties.
    This always succeeds (Gale and Ryser) if no quota is above the number of clients.
    """
    remaining = quota.astype(np.float64)
    classes_of = np.empty((clients, per_client), np.int64)
    for client in range(clients):
        # The quotas are integers, so noise below 1 only breaks ties.
        classes_of[client] = np.argsort(remaining + rng.random(len(remaining)))[-per_client:]
        remaining[classes_of[client]] -= 1
    return classes_of[rng.permutation(clients)]


def mix_classes(classes_of: Rows, classes: int, rng: np.random.Generator) -> Rows:
    """Returns the classes of each client, [N, C], after random swaps.

    In each sweep the clients are paired at random. The two clients of a pair exchange one class
    each, unless one of them would then have a class twice. The number of classes of a client and
    the number of clients of a class do not change, and all graphs with these degrees become equally
    likely.
    """
    clients, per_client = classes_of.shape
    classes_of, has = classes_of.copy(), np.zeros((clients, classes), bool)
    np.put_along_axis(has, classes_of, True, axis=1)
    for _ in range(SWEEPS_PER_CLASS * per_client if clients > 1 else 0):
        # All swaps of a sweep are independent, so they are made at once. `pairs[::-1]` is the
        # other client of each pair.
        pairs = rng.permutation(clients)[: clients // 2 * 2].reshape(2, -1)
        slots = rng.integers(per_client, size=pairs.shape)
        offered = classes_of[pairs, slots]
        allowed = ~has[pairs[::-1], offered].any(axis=0)
        pairs, slots, offered = pairs[:, allowed], slots[:, allowed], offered[:, allowed]
        has[pairs, offered], has[pairs[::-1], offered] = False, True
        classes_of[pairs, slots] = offered[::-1]
    return classes_of
