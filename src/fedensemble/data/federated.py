"""The examples of all clients in one array: client i has rows `start[i] : start[i] + size[i]`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_names
from ..errors import DataError
from .checks import (
    check_examples,
    check_lengths,
    check_server_inputs,
    check_test_set,
    describe_example,
    note_channels_last,
)
from .client_rows import (
    ClientRows,
    as_owners,
    check_calibration,
    check_test_owner,
    join_calibration,
    pair_calibration,
)
from .convert import as_inputs, as_targets, as_tensor
from .data_frame import column_names, from_frame, is_frame
from .federated_checks import (
    as_sizes,
    check_class_names_fit,
    check_client_names,
    check_field_types,
    check_notes,
)
from .labels.label_checks import (
    check_numbering,
    count_classes,
    single_client_classes,
    unseen_labels,
)
from .labels.label_names import encode_labels
from .normalize import Standardise
from .recipe import Recipe
from .splits.calibration_split import split_calibration
from .splits.new_clients import hold_out_clients


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The examples of N clients, and a test set.

    Args:
        x: inputs of all clients, in the order of the clients, [n, ...].
        y: targets, [n, ...]; integers are class labels or tokens, floating-point values are
            regression targets.
        start: first row of each client, [N].
        size: number of rows of each client, [N].
        x_test, y_test: held-out examples, or None.
        test_owner: index of the client of each test row, int64 [n_test], and -1 for rows of no
            client; None if test rows have no clients.
        calibration: rows of the clients that are not trained on, or None.
        new_clients: data of clients that are not trained on, with their own test set, or None.
        x_server: unlabelled inputs of the server, or None.
        standardise: normalization that is applied to the inputs of each batch, or None.
        classes: number of classes (or tokens); None for regression.
        class_names: name of each class, or None.
        feature_names: name of each column of the inputs, as of a DataFrame, or None.
        names: names of the clients, or None.
        info: facts for the record of a run (source, partition, ...).
        notes: sentences for the user, such as on labels that do not occur or rows that were
            dropped.
        recipe: the `[data]` table of a config that makes the same data, or None.
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
    class_names: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None
    recipe: Recipe | None = None
    calibration: ClientRows | None = None
    test_owner: Tensor | None = None
    new_clients: FederatedData | None = None

    def __post_init__(self) -> None:
        check_field_types(self)
        check_class_names_fit(self)
        check_examples(self.x, self.y, "the clients' data", self.classes)
        check_test_set(self.x_test, self.y_test, self.x, self.classes)
        if self.x_server is not None:
            check_server_inputs(self.x_server, self.x)
        if self.test_owner is not None:
            check_test_owner(self.test_owner, self.x_test, len(self.size))
        if self.calibration is not None:
            check_calibration(self.calibration, self.x, self.y, len(self.size), self.classes)
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
        held = "" if self.calibration is None else f", {len(self.calibration)} to calibrate"
        kind = "regression" if self.classes is None else f"{self.classes} classes"
        return (
            f"FederatedData({len(self)} clients, {len(self.x)} examples of "
            f"{describe_example(self.x)}, {kind}{held}, {tests} to test)"
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

    def with_calibration(self, share: float, seed: int = 0) -> FederatedData:
        """Returns the data with a random `share` of each client's rows in `calibration`.

        They are not trained on. A client keeps at least one row, and gives none if `share` of its
        rows is less than half a row.

        >>> data = FederatedData.from_arrays([[float(i)] for i in range(12)], [0, 1] * 6, [10, 2])
        >>> data = data.with_calibration(0.2)
        >>> data.size.tolist(), data.calibration.owner.tolist()
        ([8, 2], [0, 0])
        """
        return split_calibration(self, share, seed)

    def with_new_clients(self, share: float, seed: int = 0) -> FederatedData:
        """Returns the data with a random `share` of the clients in `new_clients`.

        They are not trained on. The test set stays whole; `new_clients` has a copy of their rows.

        >>> data = FederatedData.from_arrays([[float(i)] for i in range(12)], [0, 1] * 6, [3] * 4)
        >>> data = data.with_new_clients(0.25)
        >>> len(data), len(data.new_clients)
        (3, 1)
        """
        return hold_out_clients(self, share, seed)

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
    def from_clients(
        cls,
        clients: Iterable[tuple[Any, Any]],
        *,
        x_test: Any = None,
        y_test: Any = None,
        test_owner: Any = None,
        calibration: Iterable[tuple[Any, Any] | None] | None = None,
        x_server: Any = None,
        classes: int | None = None,
        class_names: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        standardise: Standardise | None = None,
        info: dict[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> FederatedData:
        """Returns data from one (inputs, targets) pair per client.

        Inputs and targets are arrays, tensors, lists or columns of a DataFrame. Labels that are
        text, categories or booleans are numbered, with the same numbers for all clients, and
        `class_names` has their names. If inputs are DataFrames, `feature_names` has the names of
        their columns, which must be the same for all clients, in the same order.

        Args:
            clients: the pairs.
            x_test, y_test: held-out examples, or None.
            test_owner: index of the client of each test row, -1 for rows of no client; or None.
            calibration: one more pair per client, of rows that are not trained on; None for a
                client without such rows. `with_calibration` splits them off the clients' data.
            x_server: unlabelled inputs of the server, or None.
            classes: number of classes; None counts them, if the targets are labels.
            class_names: name of each class, in the order of their numbers; None takes the sorted
                labels if they are text, or the categories.
            names: names of the clients, or None.
            standardise: normalization of the inputs of each batch; None scales images to 0..1.
            info: facts for the record of a run.
            notes: sentences for the user.

        >>> data = FederatedData.from_clients([([[0.0], [1.0]], ["no", "yes"]), ([[2.0]], ["yes"])])
        >>> len(data), data.size.tolist(), data.y.tolist(), data.class_names
        (2, [2, 1], [0, 1, 1], ('no', 'yes'))
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
        held_out = pair_calibration(calibration, len(clients))
        frame = next((x for x, _ in clients if is_frame(x)), None)
        feature_names = None if frame is None else column_names(frame)
        all_targets, y_test, class_names = encode_labels(
            [(f"client {index}", y) for index, (_, y) in enumerate(clients)]
            + [(f"client {index}'s rows for calibration", y) for index, (_, y) in held_out],
            None if y_test is None else ("the test data", y_test),
            class_names,
        )
        pairs = [
            (as_tensor(from_frame(x, feature_names, f"client {index}")), as_targets(y))
            for index, ((x, _), y) in enumerate(zip(clients, all_targets, strict=False))
        ]
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
        data = cls.from_arrays(
            all_x,
            all_y,
            sizes,
            x_test=x_test,
            y_test=y_test,
            test_owner=test_owner,
            calibration=join_calibration(held_out, all_targets[len(clients) :], feature_names),
            x_server=x_server,
            classes=classes,
            class_names=class_names,
            feature_names=feature_names,
            names=names,
            standardise=standardise,
            info=info,
            notes=notes,
        )
        alone = single_client_classes(data.y, data.size, data.class_names, data.names)
        # In place, because `replace` would check all examples for a second time.
        object.__setattr__(data, "notes", data.notes + ((alone,) if alone else ()))
        return data

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        sizes: Any,
        *,
        x_test: Any = None,
        y_test: Any = None,
        test_owner: Any = None,
        calibration: ClientRows | None = None,
        x_server: Any = None,
        classes: int | None = None,
        class_names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        standardise: Standardise | None = None,
        info: dict[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> FederatedData:
        """Returns data from arrays in the order of the clients; client i has `sizes[i]` rows.

        The other arguments are those of `from_clients`; `feature_names` names the columns of an
        array, and a DataFrame names its own. `calibration` is `ClientRows`.
        """
        notes = [*check_notes(notes)]
        if is_frame(x) and feature_names is None:
            feature_names = column_names(x)
        (y,), y_test, class_names = encode_labels(
            [("the clients' data", y)],
            None if y_test is None else ("the test data", y_test),
            class_names,
        )
        x = as_inputs(from_frame(x, feature_names, "the clients' data"))
        y, size = as_targets(y), as_sizes(sizes)
        check_lengths(x, y, "the clients' data")
        if x.dtype == torch.uint8 and standardise is None:
            standardise = Standardise((0.0,), (255.0,))  # images
        if x_test is not None:
            x_test = as_inputs(from_frame(x_test, feature_names, "the test data"))
        if x_server is not None:
            x_server = as_inputs(from_frame(x_server, feature_names, "the server's data"))
        y_test = None if y_test is None else as_targets(y_test)
        total = sum(size.tolist())  # Python integers, because a sum of int64 could overflow
        if total != len(x):
            raise DataError(f"Client sizes add up to {total}, but there are {len(x)} examples.")
        if class_names is not None and classes is None and not y.is_floating_point():
            classes = len(class_names)
        elif classes is None and not y.is_floating_point():
            y_held = calibration.y if isinstance(calibration, ClientRows) else None
            labels = [v for v in (y, y_test, y_held) if v is not None and v.numel()]
            classes = count_classes(labels)
            notes += check_numbering(y, y_test)
        about_images = note_channels_last(x) if x.dtype == torch.uint8 else None
        notes += [note for note in (unseen_labels(y, y_test, class_names), about_images) if note]
        return cls(
            x=x,
            y=y,
            start=torch.cumsum(size, 0) - size,
            size=size,
            x_test=x_test,
            y_test=y_test,
            standardise=standardise,
            classes=classes,
            names=tuple(names) if isinstance(names, list) else names,  # type: ignore[arg-type]
            info={} if info is None else info,
            x_server=x_server,
            notes=tuple(notes),
            class_names=None if class_names is None else tuple(class_names),
            feature_names=None if feature_names is None else tuple(feature_names),
            calibration=calibration,
            test_owner=None if test_owner is None else as_owners(test_owner),
        )

    @classmethod
    def from_huggingface(
        cls, dataset: Any, *, x: str | Sequence[str], y: str, client: str, **options: Any
    ) -> FederatedData:
        """Returns the rows of a Hugging Face dataset, divided by a column of clients.

        Args:
            dataset: a Dataset, or a DatasetDict with the splits "train" and "test". Any dataset
                with their interface will do; the package `datasets` is not imported.
            x: the column of inputs (images, arrays or tokens), or a list of columns of numbers.
            y: the column of targets: classes (ClassLabel, text, integers) or floating-point
                numbers. The names of a ClassLabel become `class_names`.
            client: the column with the client of each row. `fedensemble.data.read_huggingface`
                reads a dataset without clients, which `fedensemble.data.partition` divides.
            options: `test`, `size`, `fit`, `color` and `scale` of `read_huggingface`.
        """
        from .huggingface.read import read_huggingface
        from .partitioning.partition import partition

        if not isinstance(client, str):
            raise DataError(
                f"client must be the name of a column; got {client!r}. Without such a column: "
                "partition(read_huggingface(dataset, x=..., y=...), 'dirichlet', clients=10), both "
                "from fedensemble.data."
            )
        check_names("from_huggingface", read_huggingface, options, ("dataset", "x", "y", "client"))
        return partition(read_huggingface(dataset, x=x, y=y, client=client, **options), "natural")

    @classmethod
    def from_partitioner(
        cls, partitioner: Any, *, x: str | Sequence[str], y: str, **options: Any
    ) -> FederatedData:
        """Returns the partitions of a partitioner of flwr-datasets, each as a client.

        Args:
            partitioner: such as a DirichletPartitioner whose `dataset` is set. Any object with
                `num_partitions` and `load_partition(index)` will do; flwr-datasets is not imported.
            x, y: columns, as in `from_huggingface`.
            options: `test` (held-out rows, a Dataset), `size`, `fit`, `color` and `scale` of
                `fedensemble.data.read_huggingface`.
        """
        from .huggingface.read import read_partitioner
        from .partitioning.partition import partition

        check_names("from_partitioner", read_partitioner, options, ("partitioner", "x", "y"))
        return partition(read_partitioner(partitioner, x=x, y=y, **options), "natural")
