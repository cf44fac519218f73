"""Checks that targets fit a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..data.convert import as_targets
from ..data.labels.label_checks import check_whole
from ..data.labels.label_names import encode_targets
from ..errors import DataError, InputError


def check_targets(
    mean: Tensor, values: Any, *, regression: bool, class_names: Sequence[str] | None
) -> Tensor:
    """The targets as a tensor on the prediction's device; raises unless their shape matches.

    Args:
        mean: the prediction, [B, ..., C].
        values: targets, or labels as numbers or names of classes.
        regression: whether the targets are values and not labels.
        class_names: name of each class, or None.
    """
    if values is None:
        raise InputError("The targets are missing: pass the true label or value of each row.")
    if not regression:
        values = encode_targets(values, class_names, mean.shape[-1])
    targets = as_targets(values)
    expected = mean.shape if regression else mean.shape[:-1]
    if targets.numel() != expected.numel() or (targets.dim() and len(targets) != len(mean)):
        raise InputError(
            f"The prediction is for {len(mean)} rows and needs targets of shape {tuple(expected)}; "
            f"got {tuple(targets.shape)}."
        )
    if not regression:
        targets = check_whole(targets, "Test labels")
        if targets.numel() and int(targets.min()) < 0:
            raise DataError(f"Test labels must be 0, 1, 2, ...; got {int(targets.min())}.")
    elif not bool(targets.isfinite().all()):
        raise DataError("Targets contain nan or infinity. Clean or drop such rows.")
    return targets.to(mean.device)


def check_below(targets: Tensor, classes: int) -> None:
    """Raises if a label has no output of the model."""
    if targets.numel() and int(targets.max()) >= classes:
        raise DataError(
            f"Test labels go up to {int(targets.max())}, but the model has {classes} outputs."
        )
