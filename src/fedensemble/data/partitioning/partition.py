"""Divides the rows of a dataset among clients: `partition`, `iid`, `contiguous` and `natural`.

`class_partition.py` has the partition `classes`, `dirichlet.py` has `dirichlet` and `quantity`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...arguments import check_names, require_integer
from ...errors import InputError
from ...registry import Registry
from ..convert import as_tensor
from ..dataset import Dataset, Rows, datasets, make_rng
from ..federated import FederatedData
from ..labels.label_checks import single_client_classes
from ..recipe import partition_recipe, with_recipe
from .owners_of_test_rows import assign_test_rows

# Maps the name of a partition to a function f(source, clients, seed, **options). It returns one
# array of row numbers per client; no row occurs twice.
partitions: Registry[Callable[..., list[Rows]]] = Registry("partition")


def partition(
    source: Dataset, name: str, clients: int | None = None, seed: int = 0, **options: Any
) -> FederatedData:
    """Returns the data divided among clients; the rows of a client stay in order.

    The test set stays whole, in its order. `test_owner` divides it among the clients by the same
    rule: by their natural clients, or in proportion to their training rows of each class.

    Args:
        source: the dataset.
        name: registered name of the partition.
        clients: number of clients, N; may be None if the partition knows it, as "natural" does.
        seed: the same seed gives the same division, independent of other uses of the seed.
        options: options of the partition; unknown ones raise an error.

    >>> from fedensemble.data import load
    >>> source = load("gaussians", n=90, classes=3)
    >>> data = partition(source, "classes", clients=6, classes_per_client=2)
    >>> len(data), (data.label_counts() > 0).sum(1).tolist()
    (6, [2, 2, 2, 2, 2, 2])
    """
    function = partitions[name]
    check_names(f"partition '{name}'", function, options, given=("source", "clients", "seed"))
    require_integer(f"Partition '{name}'", "seed", seed)
    rows = [np.sort(part) for part in function(source, clients, seed, **options)]
    check_rows(name, rows, len(source))
    order = np.concatenate(rows)
    fields: dict[str, Any] = {
        "info": {**source.info, "partition": name, "partition_seed": seed, "options": options}
    }
    for field in (
        "x_test",
        "y_test",
        "x_server",
        "classes",
        "class_names",
        "feature_names",
        "standardise",
    ):
        fields[field] = getattr(source, field)
    if name == "natural" and source.group is not None and source.group_names is not None:
        fields["names"] = tuple(source.group_names[source.group[part[0]]] for part in rows)
    sizes, notes = [len(part) for part in rows], [*source.notes]
    if name == "natural" and source.group is not None and len(order) < len(source):
        notes.append(
            f"Partition 'natural' takes {len(rows)} of {len(np.unique(source.group))} clients, "
            f"with {len(order)} of {len(source)} examples; the others are not used. "
            "Leave clients and min_examples out to take all."
        )
    fields["test_owner"] = assign_test_rows(source, name, rows, seed)
    x, y = as_tensor(source.x)[order], as_tensor(source.y)[order]
    if name == "natural":  # other partitions make such clients on purpose
        alone = single_client_classes(
            y, torch.tensor(sizes), source.class_names, fields.get("names")
        )
        notes += [alone] if alone else []
    data = FederatedData.from_arrays(x, y, sizes, notes=notes, **fields)
    load = None if source.recipe is None else datasets[source.recipe["source"]]
    recipe = partition_recipe(source.recipe, load, name, clients, seed, options)
    return with_recipe(data, recipe)


def check_rows(name: str, rows: list[Rows], n: int) -> None:
    """Raises unless every client has rows, all rows exist, and no row occurs twice."""
    empty = [client for client, part in enumerate(rows) if len(part) == 0]
    if not rows or empty:
        got = f"none for client {empty[0]}" if rows else "no clients"
        raise InputError(
            f"Partition '{name}' must give every client at least one example; got {got}. "
            "Lower clients."
        )
    all_rows = np.concatenate(rows)
    if all_rows.min() < 0 or all_rows.max() >= n or np.bincount(all_rows).max() > 1:
        raise InputError(
            f"Partition '{name}' returned a row twice, or one that is not among the {n} rows."
        )


@partitions.register("iid")
def iid(source: Dataset, clients: int | None, seed: int) -> list[Rows]:
    """Rows divided at random, as evenly as possible."""
    count = check_client_count("iid", source, clients)
    return list(np.array_split(make_rng(seed, "partition/iid").permutation(len(source)), count))


@partitions.register("contiguous")
def contiguous(source: Dataset, clients: int | None, seed: int) -> list[Rows]:
    """Rows in order, cut into pieces of equal length (within one row); for continuous text."""
    return list(
        np.array_split(np.arange(len(source)), check_client_count("contiguous", source, clients))
    )


@partitions.register("natural")
def natural(source: Dataset, clients: int | None, seed: int, min_examples: int = 1) -> list[Rows]:
    """The natural clients of the dataset, in its order.

    Args:
        clients: number of clients, chosen at random, such that a smaller number chooses a subset of
            a larger one; None for all.
        min_examples: clients with fewer examples are dropped.
    """
    if source.group is None:
        raise InputError(
            f"{source.name} has no natural clients. Use another partition, such as iid, or give "
            "the client of each row: in an .npz file by an array named client, in a Dataset by its "
            "group."
        )
    order = np.argsort(source.group, kind="stable")
    _, starts = np.unique(source.group[order], return_index=True)
    groups = np.split(order, starts[1:])
    least = require_integer("Partition 'natural'", "min_examples", min_examples, minimum=1)
    eligible = [rows for rows in groups if len(rows) >= least]
    wanted = (
        len(eligible)
        if clients is None
        else require_integer("Partition 'natural'", "clients", clients, minimum=1)
    )
    if wanted > len(eligible) or not eligible:
        raise InputError(
            f"{source.name} has {len(eligible)} natural clients with at least {least} examples "
            f"({len(groups)} in all); got clients={clients}. Lower clients or min_examples."
        )
    chosen = make_rng(seed, "partition/natural").permutation(len(eligible))[:wanted]
    return [eligible[index] for index in np.sort(chosen)]


def check_client_count(
    name: str, source: Dataset, clients: int | None, min_examples: int = 1
) -> int:
    """Returns `clients`; raises unless each client can have at least `min_examples` rows."""
    if clients is None:
        raise InputError(f"Partition '{name}' needs a number of clients; got none. Set clients.")
    count = require_integer(f"Partition '{name}'", "clients", clients, minimum=1)
    least = require_integer(f"Partition '{name}'", "min_examples", min_examples, minimum=1)
    if count * least > len(source):
        raise InputError(
            f"Partition '{name}' needs {least} or more examples per client; got clients={count} "
            f"and {len(source)} examples. Lower clients to {len(source) // least} or less"
            + ("." if least == 1 else ", or lower min_examples.")
        )
    return count


def rows_by_class(labels: Rows) -> list[Rows]:
    """Returns the rows of each class that occurs, in the order of the labels."""
    _, sizes = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])
