"""The examples of all clients in one array: client i has rows `start[i] : start[i] + size[i]`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .checks import (
    check_examples,
    check_lengths,
    check_server_inputs,
    check_test_set,
    describe_example,
)
from .convert import as_inputs, as_targets, as_tensor
from .federated_checks import as_sizes, check_client_names, check_field_types, check_options
from .label_checks import check_numbering, count_classes, unseen_labels
from .normalize import Standardise


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The examples of N clients, and a test set that belongs to no client.

    Args:
        x: inputs of all clients, in the order of the clients, [n, ...].
        y: targets, [n, ...]; integers are class labels or tokens, floating-point values are
            regression targets.
        start: first row of each client, [N].
        size: number of rows of each client, [N].
        x_test, y_test: held-out examples, or None.
        x_server: unlabelled inputs of the server, or None.
        standardise: normalization that is applied to the inputs of each batch, or None.
        classes: number of classes (or tokens); None for regression.
        names: names of the clients, or None.
        info: facts for the record of a run (source, partition, ...).
        notes: sentences for the user, such as on labels that do not occur or rows that were
            dropped.
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
        check_field_types(self)
        check_examples(self.x, self.y, "the clients' data", self.classes)
        check_test_set(self.x_test, self.y_test, self.x, self.classes)
        if self.x_server is not None:
            check_server_inputs(self.x_server, self.x)
        if self.names is not None:
            check_client_names(self.names, len(self.size))
        empty = torch.nonzero(self.size <= 0).flatten().tolist()
        if empty:
            raise DataError(
                f"{len(empty)} of {len(self.size)} clients have no examples (first: client "
                f"{empty[0]}). Leave them out, or lower the number of clients."
            )
        if int(self.start.min()) < 0 or int((self.start + self.size).max()) > len(self.x):
            raise DataError(
                "The rows start : start + size of some client are not among the "
                f"{len(self.x)} rows of x."
            )

    def __repr__(self) -> str:
        """Returns a summary on one line, without the examples."""
        tests = 0 if self.x_test is None else len(self.x_test)
        kind = "regression" if self.classes is None else f"{self.classes} classes"
        return (
            f"FederatedData({len(self)} clients, {len(self.x)} examples of "
            f"{describe_example(self.x)}, {kind}, {tests} to test)"
        )

    def __len__(self) -> int:
        """Number of clients, N."""
        return len(self.size)

    def client(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the stored inputs and targets of one client."""
        rows = slice(int(self.start[index]), int(self.start[index] + self.size[index]))
        return self.x[rows], self.y[rows]

    def inputs(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns stored inputs as the model sees them: normalized, or cast to `dtype`.

        Without `standardise`, integers (tokens) stay integers.
        """
        if self.standardise is not None:
            return self.standardise(x, dtype)
        return x.to(dtype) if x.is_floating_point() else x

    def to(self, device: torch.device | str) -> FederatedData:
        """Returns the same data with the training examples on `device`."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def label_counts(self) -> Tensor:
        """Returns the number of examples per client and class, [N, C]; raises for regression."""
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
        """Returns data from one (inputs, targets) pair per client.

        Inputs and targets are arrays, tensors or lists. `options` are fields of `FederatedData`,
        such as `x_test`.

        >>> data = FederatedData.from_clients([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])])
        >>> len(data), data.size.tolist(), data.classes
        (2, [2, 1], 2)
        """
        if not isinstance(clients, Iterable) or (
            hasattr(clients, "shape") and not len(clients.shape)
        ):
            raise DataError(
                "from_clients takes a list of pairs, [(x0, y0), ...]; "
                f"got {type(clients).__name__}."
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
            # Before shapes are compared, because the shape of an empty list would not agree.
            if x.dim() > 0 and len(x) == 0:
                raise DataError(f"Client {index} has no examples. Leave it out.")
            check_lengths(x, y, f"client {index}")
            for what, tensor, first in (("inputs", x, pairs[0][0]), ("targets", y, pairs[0][1])):
                if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
                    raise DataError(
                        f"Clients disagree: {what} of client {index} are "
                        f"{describe_example(tensor)} per example, those of client 0 are "
                        f"{describe_example(first)}. Give all clients one shape and type."
                    )
        sizes = torch.tensor([len(x) for x, _ in pairs])
        all_x, all_y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
        # Check all clients at once, because a check per client is slow for a million clients. If it
        # fails, check them one by one to name the client.
        try:
            check_examples(all_x, all_y, "the clients' data")
        except DataError:
            for index, (x, y) in enumerate(pairs):
                check_examples(x, y, f"client {index}")
            raise
        return cls.from_arrays(all_x, all_y, sizes, **options)

    @classmethod
    def from_arrays(cls, x: Any, y: Any, sizes: Any, **options: Any) -> FederatedData:
        """Returns data from arrays in the order of the clients; client i has `sizes[i]` rows."""
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
        total = sum(size.tolist())  # Python integers, because a sum of int64 could overflow
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
        if (note := unseen_labels(y, options.get("y_test"))) is not None:
            options["notes"] = (*options.get("notes", ()), note)
        return cls(x=x, y=y, start=torch.cumsum(size, 0) - size, size=size, **options)
