"""Checks of labels: gaps in the numbering, test labels that no client has, one-hot or float labels.

Problems that make training useless raise an error; the others become notes for the user.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import DataError

# Largest number of classes that is inferred from labels. More classes need the argument `classes`,
# because a stray large label would make the output layer of the model huge.
MOST_CLASSES = 10_000_000


def count_classes(targets: Sequence[Tensor]) -> int:
    """Returns the largest label plus one; raises if that is no plausible number of classes."""
    # Targets with nan or infinity are skipped here; `check_examples` raises for them.
    finite = [values for values in targets if bool(values.isfinite().all())]
    largest = max((int(values.max()) for values in finite), default=-1)
    if largest >= MOST_CLASSES:
        raise DataError(
            f"Labels go up to {largest}, and a model would get an output for each of {largest + 1} "
            "classes. Number the classes 0, 1, 2, ...: numpy.unique(y, return_inverse=True)[1]."
        )
    return largest + 1


def check_whole(y: Tensor, what: str) -> Tensor:
    """Returns labels as int64; raises for floats with fractions, which a cast would truncate.

    >>> check_whole(torch.tensor([0.0, 2.0]), "Test labels").tolist()
    [0, 2]
    """
    if not y.is_floating_point():
        return y.long()
    flat = y.reshape(len(y), -1) if y.dim() else y.reshape(1, 1)
    fractions = torch.nonzero(flat != flat.floor())
    if len(fractions):
        row, column = fractions[0].tolist()
        raise DataError(
            f"{what} must be integers 0, 1, 2, ...; got {float(flat[row, column]):g} in row {row}. "
            "Give the number of the class."
        )
    return y.long()


def check_numbering(y: Tensor, y_test: Tensor | None) -> list[str]:
    """Returns a note if some labels below the largest one do not occur, as with a stray label.

    Call it if the number of classes was inferred from the labels. Tokens of a sequence are not
    checked, because a text need not contain all tokens.

    Raises:
        DataError: no label of the test set occurs in training.
    """
    if not _is_label_vector(y) or int(y.min()) < 0:
        return []
    trained = torch.unique(y)
    tested = torch.unique(y_test) if y_test is not None and _is_label_vector(y_test) else trained
    if not bool(torch.isin(tested, trained).any()):
        raise DataError(
            f"No label of the test data ({_format_labels(tested)}) occurs in training "
            f"({_format_labels(trained)}), so nothing could be predicted correctly. Number the "
            "classes of both in the same way, or give the number of classes if this is intended."
        )
    used = torch.unique(torch.cat([trained, tested]))
    classes = int(used[-1]) + 1
    if len(used) == classes:
        return []
    missing = int(torch.nonzero(used != torch.arange(len(used), device=used.device))[0])
    return [
        f"Labels go up to {classes - 1}, but only {len(used)} different ones occur (the first that "
        f"is missing is {missing}), and the model gets an output for each of {classes} classes. "
        "Number the classes 0, 1, 2, ..., or give labels as text, which is numbered: y.astype(str)."
    ]


def unseen_labels(
    y: Tensor, y_test: Tensor | None, class_names: Sequence[str] | None = None
) -> str | None:
    """Returns a sentence on labels of the test set that no client has, or None."""
    if y_test is None or not _is_label_vector(y) or not _is_label_vector(y_test):
        return None
    missing = y_test[~torch.isin(y_test, y)]
    if not len(missing):
        return None
    return (
        f"{len(missing)} of {len(y_test)} test examples have a label that never occurs in training "
        f"({_format_labels(torch.unique(missing), class_names)}): they count as errors."
    )


def single_client_classes(
    y: Tensor,
    size: Tensor,
    class_names: Sequence[str] | None = None,
    client_names: Sequence[str] | None = None,
) -> str | None:
    """Returns a sentence on classes that only one client has, or None.

    Args:
        y: labels of all clients in their order, [n].
        size: number of rows of each client, [N].
    """
    if not _is_label_vector(y) or len(size) < 2:
        return None
    owner = torch.repeat_interleave(torch.arange(len(size)), size)
    pairs = torch.unique(torch.stack([y, owner]), dim=1)
    classes, clients = torch.unique(pairs[0], return_counts=True)
    alone = classes[clients == 1].tolist()
    if not alone:
        return None
    shown = []
    for label in alone[:3]:
        client = int(pairs[1][pairs[0] == label][0])
        name = str(label) if class_names is None else f"'{class_names[label]}'"
        shown.append(f"{name} ({client if client_names is None else repr(client_names[client])})")
    more = f" and {len(alone) - 3} more" if len(alone) > 3 else ""
    return (
        f"{len(alone)} of {len(classes)} classes occur at a single client: {', '.join(shown)}"
        f"{more}. A mode learns such a class only in its visits to that client. Train for enough "
        "rounds, or merge the class with another."
    )


def advise_labels(y: Tensor) -> str | None:
    """Returns advice for targets [n, ...] that look like classes in another encoding, or None.

    Such encodings are one-hot rows, labels stored as floats, and labels in a column [n, 1].
    """
    if (
        y.dim() == 2
        and y.shape[1] > 1
        and bool(((y == 0) | (y == 1)).all())
        and bool((y.sum(1) == 1).all())
    ):
        return "They look like one-hot rows: give the number of the class, y.argmax(-1)."
    if y.is_floating_point():
        if bool((y == y.floor()).all()) and bool((y >= 0).all()):
            return (
                "They look like labels stored as floats: convert them, y.long() (NumPy: "
                "y.astype(int))."
            )
        return None
    return (
        "Each is in a row of its own: flatten them, y.reshape(-1)."
        if y.dim() == 2 and y.shape[1] == 1
        else None
    )


def _is_label_vector(y: Tensor) -> bool:
    """Returns whether there is one integer per example."""
    return y.dim() == 1 and len(y) > 0 and not y.is_floating_point()


def _format_labels(labels: Tensor, class_names: Sequence[str] | None = None) -> str:
    """Returns sorted labels as text for a message."""
    if len(labels) <= 5:
        named = class_names is not None and 0 <= int(labels[0]) <= int(labels[-1]) < len(
            class_names
        )
        return ", ".join(
            class_names[label] if named and class_names is not None else str(label)
            for label in labels.tolist()
        )
    return f"{len(labels)} labels from {int(labels[0])} to {int(labels[-1])}"
