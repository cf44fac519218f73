"""Divides a source's rows among clients: the table of partitions, those that ignore labels, and
`partition` itself.
"""

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arguments import check_names, positive, whole
from ..errors import InputError
from ..registry import Registry
from .convert import as_tensor
from .dataset import Rows, Source, generator
from .federated import FederatedData

# Each is called as f(source, clients, seed, **options) and gives back one array of rows a client;
# no row twice.
partitions: Registry[Callable[..., list[Rows]]] = Registry("partition")


def partition(
    source: Source, name: str, clients: int | None = None, seed: int = 0, **options: Any
) -> FederatedData:
    """The source's data divided among clients by the partition `name`; a client's rows keep the
    source's order.

    Args:
        clients: number of clients, N; may be None where the partition knows it, as "natural" does.
        seed: the division is the same for the same seed, and independent of any other use of it.
        options: the partition's own options; a name it does not know raises.

    >>> from fedensemble.data import load
    >>> data = partition(load("gaussians", n=90, classes=3), "classes", clients=6, classes_per_client=2)
    >>> len(data), (data.label_counts() > 0).sum(1).tolist()
    (6, [2, 2, 2, 2, 2, 2])
    """
    function = partitions[name]
    check_names(f"partition '{name}'", function, options, given=("source", "clients", "seed"))
    whole(f"Partition '{name}'", "seed", seed)
    rows = [np.sort(part) for part in function(source, clients, seed, **options)]
    check_rows(name, rows, len(source))
    order = np.concatenate(rows)
    facts: dict[str, Any] = {
        "info": {**source.info, "partition": name, "partition_seed": seed, "options": options}
    }
    for fact in ("x_test", "y_test", "x_server", "classes", "standardise"):
        # left out, so that from_arrays can find its own default
        if getattr(source, fact) is not None:
            facts[fact] = getattr(source, fact)
    if name == "natural" and source.group is not None and source.group_names is not None:
        facts["names"] = tuple(source.group_names[source.group[part[0]]] for part in rows)
    sizes = [len(part) for part in rows]
    if name == "natural" and source.group is not None and len(order) < len(source):
        facts["notes"] = (
            f"Partition 'natural' takes {len(rows)} of {len(np.unique(source.group))} clients, with {len(order)} of "
            f"{len(source)} examples; the others are not used. Leave clients and min_examples out to take all.",
        )
    return FederatedData.from_arrays(
        as_tensor(source.x)[order], as_tensor(source.y)[order], sizes, **facts
    )


def check_rows(name: str, rows: list[Rows], n: int) -> None:
    """Raises unless every client has rows, all of them exist, and none is given out twice."""
    empty = [client for client, part in enumerate(rows) if len(part) == 0]
    if not rows or empty:
        got = f"none for client {empty[0]}" if rows else "no clients"
        raise InputError(
            f"Partition '{name}' must give every client at least one example; got {got}. Lower clients."
        )
    every = np.concatenate(rows)
    if every.min() < 0 or every.max() >= n or np.bincount(every).max() > 1:
        raise InputError(
            f"Partition '{name}' gave out a row twice, or one that is not among the {n} rows."
        )


@partitions.register("iid")
def iid(source: Source, clients: int | None, seed: int) -> list[Rows]:
    """Rows dealt out at random, as evenly as can be."""
    count = number_of_clients("iid", source, clients)
    return list(np.array_split(generator(seed, "partition/iid").permutation(len(source)), count))


@partitions.register("contiguous")
def contiguous(source: Source, clients: int | None, seed: int) -> list[Rows]:
    """The rows in their order, cut into pieces of one length (give or take one row); for a text
    without clients.
    """
    return list(
        np.array_split(np.arange(len(source)), number_of_clients("contiguous", source, clients))
    )


@partitions.register("quantity")
def quantity(
    source: Source, clients: int | None, seed: int, beta: float = 0.5, min_examples: int = 1
) -> list[Rows]:
    """Clients of unlike sizes: shares of the rows ~ Dirichlet(beta), which rows at random.

    Args:
        beta: the smaller, the more unlike the sizes.
        min_examples: clients below it are filled up from the largest ones.
    """
    count = number_of_clients("quantity", source, clients, min_examples)
    random = generator(seed, "partition/quantity")
    shares = dirichlet_shares(random, positive("Partition 'quantity'", "beta", beta), count)
    rows = np.split(random.permutation(len(source)), cuts(shares, len(source)))
    return fill_up(rows, min_examples, random)


@partitions.register("natural")
def natural(source: Source, clients: int | None, seed: int, min_examples: int = 1) -> list[Rows]:
    """The source's own clients, in its order.

    Args:
        clients: so many of them, chosen at random (fewer are a part of more); None for all.
        min_examples: clients with fewer examples are left out.
    """
    if source.group is None:
        raise InputError(
            f"{source.name} has no natural clients. Use another partition, such as iid, or say whose each row is: "
            "in an .npz file by an array named client, in a Source by its group."
        )
    order = np.argsort(source.group, kind="stable")
    _, starts = np.unique(source.group[order], return_index=True)
    groups = np.split(order, starts[1:])
    least = whole("Partition 'natural'", "min_examples", min_examples, minimum=1)
    kept = [rows for rows in groups if len(rows) >= least]
    wanted = (
        len(kept)
        if clients is None
        else whole("Partition 'natural'", "clients", clients, minimum=1)
    )
    if wanted > len(kept) or not kept:
        raise InputError(
            f"{source.name} has {len(kept)} natural clients with at least {least} examples ({len(groups)} in all); "
            f"got clients={clients}. Lower clients or min_examples."
        )
    chosen = generator(seed, "partition/natural").permutation(len(kept))[:wanted]
    return [kept[index] for index in np.sort(chosen)]


def number_of_clients(name: str, source: Source, clients: int | None, min_examples: int = 1) -> int:
    """`clients`; raises unless it is a number for which everyone can have `min_examples` rows."""
    if clients is None:
        raise InputError(f"Partition '{name}' needs a number of clients; got none. Set clients.")
    count = whole(f"Partition '{name}'", "clients", clients, minimum=1)
    least = whole(f"Partition '{name}'", "min_examples", min_examples, minimum=1)
    if count * least > len(source):
        raise InputError(
            f"Partition '{name}' needs {least} or more examples a client; "
            f"got clients={count} and {len(source)} examples. Lower clients to {len(source) // least} or less"
            + ("." if least == 1 else ", or lower min_examples.")
        )
    return count


def dirichlet_shares(
    random: np.random.Generator, concentration: float, count: int
) -> np.ndarray[Any, Any]:
    """Shares that add up to 1 ~ Dirichlet(concentration, ..., concentration), [count]."""
    shares = random.dirichlet(np.full(count, concentration))
    if not np.isfinite(shares).all() or abs(shares.sum() - 1) > 1e-6:
        # Below about 1e-3 all gamma variates can underflow to 0; the limit of the distribution is
        # one client with all.
        shares = np.eye(1, count, int(random.integers(count)))[0]
    return shares


def cuts(shares: np.ndarray[Any, Any], n: int) -> Rows:
    """Where to cut n rows so that the pieces have these shares, rounded, [len(shares) - 1]."""
    places: Rows = np.clip(np.rint(np.cumsum(shares)[:-1] * n), 0, n).astype(np.int64)
    return places


def fill_up(rows: list[Rows], least: int, random: np.random.Generator) -> list[Rows]:
    """The clients' rows with everyone below `least` filled up to it, row by row from whoever has
    most at the time.
    """
    if min(len(part) for part in rows) >= least:
        return rows
    held = [list(random.permutation(part)) for part in rows]
    largest = [(-len(part), client) for client, part in enumerate(held) if len(part) > least]
    heapq.heapify(largest)
    for part in held:
        while len(part) < least:
            size, giver = heapq.heappop(largest)
            part.append(held[giver].pop())
            if -size - 1 > least:
                heapq.heappush(largest, (size + 1, giver))
    return [np.array(part, np.int64) for part in held]
