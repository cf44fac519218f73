"""Partitions by class label: exactly C classes a client, and label-Dirichlet."""

import numpy as np

from ..arguments import positive, whole
from ..errors import InputError
from .dataset import Rows, Source, generator
from .partition import cuts, dirichlet_shares, fill_up, number_of_clients, partitions

# every client is offered so many swaps for each class it has; the graph is random before that
SWEEPS_PER_CLASS = 20


@partitions.register("classes")
def classes(source: Source, clients: int | None, seed: int, classes_per_client: int) -> list[Rows]:
    """Every client has examples of exactly C distinct classes, and every example is given out.

    A class is given to a number of clients in proportion to its size and divided evenly among them;
    who gets which classes is a random bipartite graph with those degrees.

    Args:
        classes_per_client: C.
    """
    owner = "Partition 'classes'"
    wanted = whole(owner, "classes_per_client", classes_per_client, minimum=1)
    count = number_of_clients("classes", source, clients)
    by_class = rows_by_class(source.labels())
    quota = class_quotas(np.array([len(rows) for rows in by_class]), count, wanted)
    random = generator(seed, "partition/classes")
    held = mix_classes(deal_classes(quota, count, wanted, random), len(by_class), random)
    parts: list[list[Rows]] = [[] for _ in range(count)]
    order = np.argsort(held.ravel(), kind="stable") // wanted  # clients of class 0, of class 1, ...
    for rows, owners in zip(by_class, np.split(order, np.cumsum(quota)[:-1]), strict=True):
        # Both shuffled: neither does a client number decide who gets an odd example, nor the order
        # of the rows.
        pieces = np.array_split(random.permutation(rows), len(owners))
        for client, piece in zip(random.permutation(owners), pieces, strict=True):
            parts[client].append(piece)
    return [np.concatenate(part) for part in parts]


@partitions.register("dirichlet")
def dirichlet(
    source: Source, clients: int | None, seed: int, alpha: float = 0.5, min_examples: int = 1
) -> list[Rows]:
    """Label-Dirichlet (Hsu, Qi and Brown, 2019): the clients' shares of every class ~
    Dirichlet(alpha).

    Args:
        alpha: the smaller, the fewer classes a client has.
        min_examples: clients below it are filled up from the largest ones.
    """
    labels = source.labels()
    count = number_of_clients("dirichlet", source, clients, min_examples)
    alpha = positive("Partition 'dirichlet'", "alpha", alpha)
    random = generator(seed, "partition/dirichlet")
    owner = np.empty(len(labels), np.int64)
    for rows in rows_by_class(labels):
        places = cuts(dirichlet_shares(random, alpha, count), len(rows))
        sizes = np.diff(places, prepend=0, append=len(rows))
        owner[random.permutation(rows)] = np.repeat(np.arange(count), sizes)
    ends = np.cumsum(np.bincount(owner, minlength=count))
    return fill_up(np.split(np.argsort(owner, kind="stable"), ends[:-1]), min_examples, random)


def rows_by_class(labels: Rows) -> list[Rows]:
    """The rows of each class that occurs, in the order of the labels."""
    _, sizes = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])


def class_quotas(sizes: Rows, clients: int, wanted: int) -> Rows:
    """Number of clients each class is given to: in proportion to `sizes`, from 1 to min(clients,
    size), N C in all.

    >>> class_quotas(np.array([100, 100, 50]), clients=5, wanted=1)
    array([2, 2, 1])
    """
    most = np.minimum(sizes, clients)
    total = clients * wanted
    got = f"got clients={clients}, classes_per_client={wanted}"
    if wanted > len(sizes):
        raise InputError(
            f"Partition 'classes' needs classes_per_client <= the {len(sizes)} classes in the data; {got}. "
            "Lower classes_per_client."
        )
    if total < len(sizes):
        raise InputError(
            f"Partition 'classes' gives out every example, so clients x classes_per_client must be at least the "
            f"{len(sizes)} classes in the data; {got}. Raise either."
        )
    if total > most.sum():
        raise InputError(
            f"Partition 'classes' needs {total} pairs of a client and a class, but the classes have examples for only "
            f"{most.sum()} (the smallest class has {sizes.min()}); {got}. Lower clients or classes_per_client."
        )
    # Without the bounds the quotas would be scale * sizes; the scale at which the bounded ones add
    # up to the total.
    low, high = 0.0, float(total)
    for _ in range(200):
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(scale * sizes, 1, most).sum() < total else (low, scale)
    exact = np.clip(high * sizes, 1, most)
    quota: Rows = np.floor(exact).astype(np.int64)
    # Largest remainder; a class that is at its upper bound has none.
    raised = np.argsort(np.where(quota < most, quota - exact, 1), kind="stable")[
        : total - quota.sum()
    ]
    quota[raised] += 1
    return quota


def deal_classes(quota: Rows, clients: int, wanted: int, random: np.random.Generator) -> Rows:
    """The classes of each client, [N, C]: each in turn takes the C classes with the largest quota
    left, ties at random.

    Taking the largest never gets stuck (Gale and Ryser), as long as no quota is above the number of
    clients.
    """
    left = quota.astype(np.float64)
    held = np.empty((clients, wanted), np.int64)
    for client in range(clients):
        # quotas are whole: noise only breaks ties
        held[client] = np.argsort(left + random.random(len(left)))[-wanted:]
        left[held[client]] -= 1
    return held[random.permutation(clients)]


def mix_classes(held: Rows, classes: int, random: np.random.Generator) -> Rows:
    """The same graph after random swaps: two clients exchange a class each where both stay without
    duplicates.

    Clients are paired at random in each sweep, so all swaps of a sweep are independent. Neither the
    number of classes of a client nor that of clients of a class changes, and all graphs with these
    numbers become equally likely.
    """
    clients, wanted = held.shape
    held, has = held.copy(), np.zeros((clients, classes), bool)
    np.put_along_axis(has, held, True, axis=1)
    for _ in range(SWEEPS_PER_CLASS * wanted if clients > 1 else 0):
        pairs = random.permutation(clients)[: clients // 2 * 2].reshape(2, -1)
        slots = random.integers(wanted, size=pairs.shape)
        offered = held[pairs, slots]
        allowed = ~has[pairs[::-1], offered].any(axis=0)
        pairs, slots, offered = pairs[:, allowed], slots[:, allowed], offered[:, allowed]
        has[pairs, offered], has[pairs[::-1], offered] = False, True
        held[pairs, slots] = offered[::-1]
    return held
