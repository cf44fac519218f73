"""Losses per example, and whether a task is classification or regression."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError, unknown
from ..runtime.oom import out_of_memory

Loss = Callable[[Tensor, Tensor], Tensor]
Task = Literal["classification", "regression"]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy per example, [B]; for a sequence, the mean over its positions.

    Classes are the last dimension of the outputs, [B, C] or [B, T, C], as in predictions; torch
    itself expects [B, C, T].
    """
    losses = F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")
    return losses.reshape(len(losses), -1).mean(1)


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error per example, [B]: the mean over the example's outputs."""
    if outputs.shape != targets.shape and outputs.shape == (*targets.shape, 1):
        outputs = outputs.squeeze(-1)
    if outputs.shape != targets.shape:
        raise InputError(
            f"The model's outputs have shape {tuple(outputs.shape)}, the targets "
            f"{tuple(targets.shape)}; loss 'mse' needs equal shapes."
        )
    return ((outputs - targets) ** 2).reshape(len(outputs), -1).mean(1)


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy per example, [B], of one logit per example for the labels 0 and 1.

    As torch's BCEWithLogitsLoss: the logit belongs to class 1. Outputs are [B] or [B, 1].
    """
    if outputs.shape == (*targets.shape, 1):
        outputs = outputs.squeeze(-1)
    if outputs.shape != targets.shape or targets.dim() != 1:
        raise InputError(
            f"Loss 'bce' needs one output per example; got outputs of shape {tuple(outputs.shape)} "
            f"for labels of shape {tuple(targets.shape)}."
        )
    return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")


def per_example(loss: Loss) -> Loss:
    """Wraps a user's loss so that it returns one value per example, [B].

    A loss that returns a scalar is taken for a mean over examples. It is evaluated for each example
    separately, with `vmap`.
    """

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        value = loss(outputs, targets)
        if not isinstance(value, Tensor):
            raise InputError(
                f"The loss must return a tensor; got {type(value).__name__}. Do not call .item() "
                "in it."
            )
        if value.dim() == 0:
            try:
                return torch.func.vmap(lambda o, t: loss(o.unsqueeze(0), t.unsqueeze(0)))(
                    outputs, targets
                )
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                reason = str(error).partition(". ")[0].removeprefix("vmap: ")
                raise InputError(
                    "The loss returns a scalar, so it is evaluated for each example separately "
                    f"with vmap, which raises: {reason}. Write the loss without data-dependent "
                    "control flow (`if` on tensor values, .item()), for example with torch.where, "
                    "or return one value per example: reduction='none'."
                ) from None
        if value.shape[:1] != outputs.shape[:1]:
            raise InputError(
                f"The loss returned shape {tuple(value.shape)} for {len(outputs)} examples; return "
                "a scalar, or one value per example."
            )
        return value.reshape(len(outputs), -1).mean(1)

    return losses


_LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "bce": bce, "mse": mse}


def find_loss(loss: str | Loss) -> Loss:
    """The loss per example for a name or a callable."""
    if callable(loss):
        return per_example(loss)
    if not isinstance(loss, str) or loss not in _LOSSES:
        raise InputError(unknown("loss", str(loss), _LOSSES))
    return _LOSSES[loss]


def lower_bound(loss: str | Loss) -> float:
    """The smallest value that a loss can take: 0 for a named loss, -inf for a callable."""
    return -math.inf if callable(loss) else 0.0


def task_of(loss: str | Loss, targets: Tensor) -> Task:
    """The task of a named loss; otherwise integer targets mean classification."""
    if isinstance(loss, str):
        return "regression" if loss == "mse" else "classification"
    return "regression" if targets.is_floating_point() else "classification"


def count_outputs(loss: str, classes: int) -> int:
    """The number of outputs that a named loss for classification needs for these classes."""
    return 1 if loss == "bce" else classes


def class_logits(loss: str | Loss, outputs: Tensor) -> Tensor:
    """Outputs of a classifier as one logit per class, [B, ..., C]; for regression, the outputs.

    A model with loss "bce" has one output z per example. The probabilities 1 - sigmoid(z) and
    sigmoid(z) of its two classes are the softmax of the logits 0 and z.

    >>> class_logits("bce", torch.tensor([[2.0], [-1.0]])).tolist()
    [[0.0, 2.0], [0.0, -1.0]]
    """
    if loss != "bce":
        return outputs
    logit = outputs.reshape(outputs.shape[0])  # not len(), which torch.export takes for a constant
    return torch.stack([torch.zeros_like(logit), logit], -1)


def check_loss(loss: str | Loss, losses: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Raises unless a user's loss is a mean over examples, or one value per example.

    Args:
        loss: as the user passed it.
        losses: the same per example, by `find_loss`.
    """
    if isinstance(loss, str) or len(outputs) < 2:
        return
    each, value = losses(outputs, targets), loss(outputs, targets)
    tolerance: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5, "equal_nan": True}
    if value.dim() == 0 and not torch.allclose(value, each.mean(), **tolerance):
        raise InputError(
            f"The loss is not the mean over its examples: it is {float(value):.6g} for "
            f"{len(outputs)} examples together, and {float(each.mean()):.6g} on average for each "
            "separately (class weights, ignore_index and reduction='sum' have this effect). Return "
            "one value per example: reduction='none'."
        )
    if value.dim() > 0 and not torch.allclose(
        losses(outputs[:-1], targets[:-1]), each[:-1], **tolerance
    ):
        raise InputError(
            f"The loss of an example depends on the others: outputs {tuple(outputs.shape)} and "
            f"targets {tuple(targets.shape)} may have been broadcast against each other."
        )
