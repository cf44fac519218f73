"""Rows of clients that are not trained on: rows for calibration, and the owners of test rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .checks import check_examples, check_lengths, describe_example
from .convert import as_inputs, as_targets, as_tensor
from .data_frame import from_frame

NOBODY = -1  # owner of a test row that belongs to no client


@dataclass(frozen=True, eq=False)
class ClientRows:
    """Rows of clients, each with the index of the client that owns it.

    Args:
        x: inputs, [n, ...].
        y: targets, [n, ...].
        owner: index of the client of each row, int64 [n].

    >>> rows = ClientRows(torch.zeros(3, 2), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 2]))
    >>> len(rows), rows.sizes(4).tolist(), rows.client(2)[1].tolist()
    (3, [2, 0, 1, 0], [1])
    """

    x: Tensor
    y: Tensor
    owner: Tensor

    def __post_init__(self) -> None:
        for name in ("x", "y", "owner"):
            if not isinstance(getattr(self, name), Tensor):
                raise DataError(
                    f"{name} of ClientRows must be a tensor; got "
                    f"{type(getattr(self, name)).__name__}."
                )
        check_examples(self.x, self.y, "the rows of clients")
        check_owners(self.owner, len(self.x), "rows", lowest=0)

    def __len__(self) -> int:
        """Number of rows, n."""
        return len(self.owner)

    def client(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the stored inputs and targets of one client; empty if it has none."""
        mine = self.owner == index
        return self.x[mine], self.y[mine]

    def sizes(self, clients: int) -> Tensor:
        """Returns the number of rows of each client, [N].

        Args:
            clients: number of clients, N.
        """
        return torch.bincount(self.owner, minlength=clients)


def check_owners(owner: Tensor, rows: int, what: str, lowest: int) -> None:
    """Raises unless there is one owner per row, none below `lowest`.

    Args:
        rows: number of rows.
        what: the rows, in messages.
    """
    if owner.dtype != torch.int64 or owner.shape != (rows,):
        raise DataError(
            f"The owners of {rows} {what} must be the index of one client per row, int64 "
            f"[{rows}]; got {owner.dtype} of shape {tuple(owner.shape)}."
        )
    if rows and int(owner.min()) < lowest:
        no_client = f" ({NOBODY} for a row of no client)" if lowest < 0 else ""
        raise DataError(
            f"Owners of {what} are indices of clients from 0{no_client}; got {int(owner.min())}."
        )


def check_calibration(
    rows: ClientRows, x: Tensor, y: Tensor, clients: int, classes: int | None
) -> None:
    """Raises unless the rows for calibration look like the training examples of the clients.

    Args:
        x, y: training examples.
        clients: number of clients.
        classes: number of classes, or None.
    """
    if not isinstance(rows, ClientRows):
        raise DataError(
            "calibration must be ClientRows(x, y, owner) or None; got "
            f"{type(rows).__name__}. from_clients takes one (inputs, targets) pair per client."
        )
    for what, mine, trained in (("Inputs", rows.x, x), ("Targets", rows.y, y)):
        if mine.shape[1:] != trained.shape[1:] or mine.dtype != trained.dtype:
            raise DataError(
                f"{what} for calibration are {describe_example(mine)} per example, those for "
                f"training {describe_example(trained)}; they must agree."
            )
    check_examples(rows.x, rows.y, "the rows for calibration", classes)
    if len(rows) and int(rows.owner.max()) >= clients:
        raise DataError(
            f"A row for calibration belongs to client {int(rows.owner.max())}, but there are "
            f"{clients} clients, 0 to {clients - 1}."
        )


def check_test_owner(owner: Tensor, x_test: Tensor | None, clients: int) -> None:
    """Raises unless each test row has an owner: a client, or -1."""
    if x_test is None:
        raise DataError("test_owner needs a test set: give x_test and y_test, too.")
    if not isinstance(owner, Tensor):
        raise DataError(f"test_owner must be a tensor; got {type(owner).__name__}.")
    check_owners(owner, len(x_test), "test rows", lowest=NOBODY)
    if len(owner) and int(owner.max()) >= clients:
        raise DataError(
            f"A test row belongs to client {int(owner.max())}, but there are {clients} clients, "
            f"0 to {clients - 1}. Rows of no client have owner {NOBODY}."
        )


def as_owners(values: Any) -> Tensor:
    """Returns indices of clients as int64; raises unless they are integers."""
    owner = as_tensor(values)
    if owner.is_floating_point():
        raise DataError(f"Owners of rows must be integers, indices of clients; got {owner.dtype}.")
    return owner.long()


def pair_calibration(pairs: Any, clients: int) -> list[tuple[int, tuple[Any, Any]]]:
    """Returns client and pair of those that have rows for calibration.

    Args:
        pairs: one (inputs, targets) pair per client, or None for a client without rows.
        clients: number of clients.
    """
    if pairs is None:
        return []
    pairs = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    if len(pairs) != clients or not all(
        pair is None or (isinstance(pair, Sequence) and len(pair) == 2) for pair in pairs
    ):
        raise DataError(
            f"calibration must have one (inputs, targets) pair for each of the {clients} clients, "
            f"None for a client without such rows; got {len(pairs)} entries."
        )
    return [
        (client, pair) for client, pair in enumerate(pairs) if pair is not None and len(pair[1])
    ]


def join_calibration(
    pairs: list[tuple[int, tuple[Any, Any]]], targets: Sequence[Any], feature_names: Any
) -> ClientRows | None:
    """Returns the rows for calibration of all clients, or None without any.

    Args:
        pairs: result of `pair_calibration`.
        targets: targets of the pairs, as numbers.
        feature_names: columns of DataFrames, or None.
    """
    parts = []
    for (client, (x, _)), y in zip(pairs, targets, strict=True):
        where = f"client {client}'s rows for calibration"
        inputs, labels = as_inputs(from_frame(x, feature_names, where)), as_targets(y)
        check_lengths(inputs, labels, where)
        parts.append((inputs, labels, torch.full((len(inputs),), client)))
        for what, mine, first in zip(("inputs", "targets"), parts[-1], parts[0], strict=False):
            if mine.shape[1:] != first.shape[1:] or mine.dtype != first.dtype:
                raise DataError(
                    f"Clients disagree: {what} of {where} are {describe_example(mine)} per "
                    f"example, those of client {pairs[0][0]} {describe_example(first)}."
                )
    if not parts:
        return None
    x, y, owner = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return ClientRows(x, y, owner)
