"""All clients' examples in one flat array with offsets: client i owns rows `start[i] : start[i] +
size[i]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .checks import check_examples, check_lengths, check_server, check_test, describe
from .convert import as_inputs, as_targets, as_tensor
from .federated_checks import as_sizes, check_kinds, check_names, check_options
from .label_checks import check_numbering, count_classes, unseen_labels
from .normalize import Standardise


@dataclass(frozen=True, eq=False)
class FederatedData:
    """N clients' examples, and a test set that belongs to nobody.

    Args:
        x: inputs of all clients, one after another, [n, ...].
        y: targets, [n, ...]; integers are class labels or tokens, floating-point numbers are
            regression targets.
        start: first row of each client, [N].
        size: number of rows of each client, [N].
        x_test, y_test: held-out examples, or None.
        x_server: inputs without targets that the server has, or None.
        standardise: applied to inputs when a batch is drawn, or None.
        classes: number of classes (or tokens); None for regression.
        names: names of the clients, where they have any.
        info: facts for the run's record (source, partition, ...).
        notes: what a user should know of the data: labels that are missing, rows that were left
            out.
    """

    x: Tensor
    y: Tensor
    start: Tensor
    size: Tensor
    x_test: Tensor | None = None
    y_test: Tensor | None = None
    standardise: Standardise | None = None
    classes: int | None = None
    names: tuple[str, ...] | None = None
    info: dict[str, Any] = field(default_factory=dict)
    x_server: Tensor | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_kinds(self)
        check_examples(self.x, self.y, "the clients' data", self.classes)
        check_test(self.x_test, self.y_test, self.x, self.classes)
        if self.x_server is not None:
            check_server(self.x_server, self.x)
        if self.names is not None:
            check_names(self.names, len(self.size))
        empty = torch.nonzero(self.size <= 0).flatten().tolist()
        if empty:
            raise DataError(
                f"{len(empty)} of {len(self.size)} clients have no examples (first: client {empty[0]}). "
                "Leave them out, or lower the number of clients."
            )
        if int(self.start.min()) < 0 or int((self.start + self.size).max()) > len(self.x):
            raise DataError(
                f"Some client's rows, start : start + size, are not among the {len(self.x)} rows of x."
            )

    def __repr__(self) -> str:
        """What it is, on one line; not its examples."""
        tests = 0 if self.x_test is None else len(self.x_test)
        kind = "regression" if self.classes is None else f"{self.classes} classes"
        return f"FederatedData({len(self)} clients, {len(self.x)} examples of {describe(self.x)}, {kind}, {tests} to test)"

    def __len__(self) -> int:
        """Number of clients, N."""
        return len(self.size)

    def client(self, index: int) -> tuple[Tensor, Tensor]:
        """The stored inputs and targets of one client."""
        rows = slice(int(self.start[index]), int(self.start[index] + self.size[index]))
        return self.x[rows], self.y[rows]

    def inputs(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Stored inputs as the model sees them: standardised; integers without a rule (tokens) stay
        integers.
        """
        if self.standardise is not None:
            return self.standardise(x, dtype)
        return x.to(dtype) if x.is_floating_point() else x

    def to(self, device: torch.device | str) -> FederatedData:
        """The same data with the training examples on `device`; nothing is copied if they are
        there.
        """
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def label_counts(self) -> Tensor:
        """Examples of each class at each client, [N, C]; raises for regression data."""
        if self.classes is None:
            raise DataError("These targets are not class labels, so there is no label histogram.")
        owner = torch.repeat_interleave(torch.arange(len(self)), self.size.cpu())
        per_row = self.y.cpu().reshape(len(self.y), -1).long()
        flat = owner.unsqueeze(1) * self.classes + per_row
        return torch.bincount(flat.flatten(), minlength=len(self) * self.classes).reshape(
            len(self), self.classes
        )

    @classmethod
    def from_clients(cls, clients: Iterable[tuple[Any, Any]], **options: Any) -> FederatedData:
        """Data from one (inputs, targets) pair a client; arrays, tensors or lists.

        >>> data = FederatedData.from_clients([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])])
        >>> len(data), data.size.tolist(), data.classes
        (2, [2, 1], 2)
        """
        if not isinstance(clients, Iterable) or (
            hasattr(clients, "shape") and not len(clients.shape)
        ):
            raise DataError(
                f"from_clients takes a list of pairs, [(x0, y0), ...]; got {type(clients).__name__}."
            )
        clients = list(clients)
        if not clients:
            raise DataError("There are no clients: pass at least one (inputs, targets) pair.")
        if not all(isinstance(client, Sequence) and len(client) == 2 for client in clients):
            raise DataError(
                "Each client must be a pair of inputs and targets: from_clients([(x0, y0), ...])."
            )
        pairs = [(as_tensor(x), as_targets(y)) for x, y in clients]
        for index, (x, y) in enumerate(pairs):
            # before shapes are compared: an empty list has no shape to speak of
            if x.dim() > 0 and len(x) == 0:
                raise DataError(f"Client {index} has no examples. Leave it out.")
            check_lengths(x, y, f"client {index}")
            for what, got, first in (("inputs", x, pairs[0][0]), ("targets", y, pairs[0][1])):
                if got.shape[1:] != first.shape[1:] or got.dtype != first.dtype:
                    raise DataError(
                        f"Clients disagree: {what} of client {index} are {describe(got)} an example, "
                        f"those of client 0 are {describe(first)}. Give all clients one shape and type."
                    )
        sizes = torch.tensor([len(x) for x, _ in pairs])
        every_x, every_y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
        try:
            # at once: there may be a million clients
            check_examples(every_x, every_y, "the clients' data")
        except DataError:
            for index, (x, y) in enumerate(pairs):
                check_examples(x, y, f"client {index}")
            raise
        return cls.from_arrays(every_x, every_y, sizes, **options)

    @classmethod
    def from_arrays(cls, x: Any, y: Any, sizes: Any, **options: Any) -> FederatedData:
        """Data from arrays that already lie client after client, `sizes[i]` rows each."""
        check_options(options)
        x, y, size = as_inputs(x), as_targets(y), as_sizes(sizes)
        check_lengths(x, y, "the clients' data")
        if x.dtype == torch.uint8:
            options.setdefault("standardise", Standardise((0.0,), (255.0,)))  # images
        for name, convert in (
            ("x_test", as_inputs),
            ("y_test", as_targets),
            ("x_server", as_inputs),
        ):
            if options.get(name) is not None:
                options[name] = convert(options[name])
        total = sum(size.tolist())  # as Python's integers: a sum of int64 could wrap
        if total != len(x):
            raise DataError(f"Client sizes add up to {total}, but there are {len(x)} examples.")
        if "classes" not in options and not y.is_floating_point():
            targets = [
                values
                for values in (y, options.get("y_test"))
                if values is not None and values.numel()
            ]
            options["classes"] = count_classes(targets)
            options["notes"] = (
                *options.get("notes", ()),
                *check_numbering(y, options.get("y_test")),
            )
        if (strange := unseen_labels(y, options.get("y_test"))) is not None:
            options["notes"] = (*options.get("notes", ()), strange)
        return cls(x=x, y=y, start=torch.cumsum(size, 0) - size, size=size, **options)
