"""Labels that are odd: numbers left out, test labels never trained on, classes not written as whole
numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import DataError

# that are believed where labels are counted; more must be asked for by `classes`
MOST_CLASSES = 10_000_000


def count_classes(targets: Sequence[Tensor]) -> int:
    """The largest label and one more; raises where that is no plausible number of classes."""
    # others are refused where they are checked
    known = [values for values in targets if bool(values.isfinite().all())]
    most = max((int(values.max()) for values in known), default=-1)
    if most >= MOST_CLASSES:
        raise DataError(
            f"Labels go up to {most}, and a model would get an output for each of {most + 1} classes. Number the "
            "classes 0, 1, 2, ...: numpy.unique(y, return_inverse=True)[1]."
        )
    return most + 1


def check_whole(y: Tensor, what: str) -> Tensor:
    """Labels as int64; raises if they are floats with fractions, which a conversion would cut off.

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
            f"{what} must be whole numbers 0, 1, 2, ...; got {float(flat[row, column]):g} in row {row}. Give the "
            "number of the class."
        )
    return y.long()


def check_numbering(y: Tensor, y_test: Tensor | None) -> list[str]:
    """A note where labels leave numbers out, as a stray one does; raises if no label of the test
    set is in training.

    For where the number of classes was counted; tokens of a sequence may well leave some out.
    """
    if not _labels(y) or int(y.min()) < 0:
        return []
    trained = torch.unique(y)
    tested = torch.unique(y_test) if y_test is not None and _labels(y_test) else trained
    if not bool(torch.isin(tested, trained).any()):
        raise DataError(
            f"No label of the test data ({_span(tested)}) occurs in training ({_span(trained)}), so nothing could be "
            "predicted right. Number the classes of both alike, or give the number of classes if this is meant."
        )
    used = torch.unique(torch.cat([trained, tested]))
    classes = int(used[-1]) + 1
    if len(used) == classes:
        return []
    missing = int(torch.nonzero(used != torch.arange(len(used), device=used.device))[0])
    return [
        f"Labels go up to {classes - 1}, but only {len(used)} different ones occur (the first that is missing is "
        f"{missing}), and the model gets an output for each of {classes} classes. Number the classes 0, 1, 2, ..."
    ]


def unseen_labels(y: Tensor, y_test: Tensor | None) -> str | None:
    """A sentence on labels of the test set that no client has, or None."""
    if y_test is None or not _labels(y) or not _labels(y_test):
        return None
    missing = y_test[~torch.isin(y_test, y)]
    if not len(missing):
        return None
    return (
        f"{len(missing)} of {len(y_test)} test examples have a label that never occurs in training "
        f"({_span(torch.unique(missing))}): they count as errors."
    )


def advise_labels(y: Tensor) -> str | None:
    """What to do with targets [n, ...] that are classes, but not written as one whole number an
    example; or None.
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
            return "They look like labels stored as floats: convert them, y.long() (NumPy: y.astype(int))."
        return None
    return (
        "Each is in a row of its own: flatten them, y.reshape(-1)."
        if y.dim() == 2 and y.shape[1] == 1
        else None
    )


def _labels(y: Tensor) -> bool:
    """Whether there is one whole number an example."""
    return y.dim() == 1 and len(y) > 0 and not y.is_floating_point()


def _span(labels: Tensor) -> str:
    """Sorted labels for a message."""
    if len(labels) <= 5:
        return ", ".join(str(label) for label in labels.tolist())
    return f"{len(labels)} labels from {int(labels[0])} to {int(labels[-1])}"
