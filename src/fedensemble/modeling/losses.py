"""Losses by example: what a model is trained on, and whether its outputs are classes or numbers."""

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
    """Cross-entropy of each example, [B]; a sequence counts by the mean over its positions.

    Classes are the last dimension of the outputs, [B, C] or [B, T, C], as in predictions; torch
    itself wants [B, C, T].
    """
    losses = F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")
    return losses.reshape(len(losses), -1).mean(1)


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error of each example, the mean over its outputs, [B]."""
    if outputs.shape != targets.shape and outputs.shape == (*targets.shape, 1):
        outputs = outputs.squeeze(-1)
    if outputs.shape != targets.shape:
        raise InputError(
            f"The model's outputs have shape {tuple(outputs.shape)}, the targets {tuple(targets.shape)}; "
            "loss 'mse' needs them equal."
        )
    return ((outputs - targets) ** 2).reshape(len(outputs), -1).mean(1)


def by_example(loss: Loss) -> Loss:
    """Any loss as one that gives a number an example.

    A loss that returns one number is taken as a mean over examples, and is asked about one example
    at a time.
    """

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        value = loss(outputs, targets)
        if not isinstance(value, Tensor):
            raise InputError(
                f"The loss must return a tensor; got {type(value).__name__}. Do not call .item() in it."
            )
        if value.dim() == 0:
            try:
                return torch.func.vmap(lambda o, t: loss(o.unsqueeze(0), t.unsqueeze(0)))(
                    outputs, targets
                )
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                raise InputError(
                    "The loss returns one number, so it is asked about one example at a time by vmap, which says: "
                    f"{str(error).partition('. ')[0].removeprefix('vmap: ')}. Write it without `if` on numbers and "
                    ".item(), as with torch.where, or return one number an example: reduction='none'."
                ) from None
        if value.shape[:1] != outputs.shape[:1]:
            raise InputError(
                f"The loss returned shape {tuple(value.shape)} for {len(outputs)} examples; return one number, or one "
                "an example."
            )
        return value.reshape(len(outputs), -1).mean(1)

    return losses


_NAMED: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mse}


def find_loss(loss: str | Loss) -> Loss:
    """The loss by example for a name or a callable."""
    if callable(loss):
        return by_example(loss)
    if not isinstance(loss, str) or loss not in _NAMED:
        raise InputError(unknown("loss", str(loss), _NAMED))
    return _NAMED[loss]


def lower_bound(loss: str | Loss) -> float:
    """The smallest value of a loss: 0 for those that have a name; nothing is known of a
    callable.
    """
    return -math.inf if callable(loss) else 0.0


def task_of(loss: str | Loss, targets: Tensor) -> Task:
    """What is being learned: a named loss says so, otherwise integer targets are classes."""
    if loss == "mse" or (loss != "cross_entropy" and targets.is_floating_point()):
        return "regression"
    return "classification"


def check_loss(given: str | Loss, losses: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Raises if a loss is not what training takes it for: a mean over examples, or one number an
    example.
    """
    if isinstance(given, str) or len(outputs) < 2:
        return
    each, whole = losses(outputs, targets), given(outputs, targets)
    close: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5, "equal_nan": True}
    if whole.dim() == 0 and not torch.allclose(whole, each.mean(), **close):
        raise InputError(
            f"The loss is not the mean over its examples: it gives {float(whole):.6g} for {len(outputs)} of them, and "
            f"{float(each.mean()):.6g} on average one by one (class weights, ignore_index, reduction='sum' do this). "
            "Return one number an example: reduction='none'."
        )
    if whole.dim() > 0 and not torch.allclose(
        losses(outputs[:-1], targets[:-1]), each[:-1], **close
    ):
        raise InputError(
            f"The loss of an example depends on the others: outputs {tuple(outputs.shape)} and targets "
            f"{tuple(targets.shape)} may have been broadcast against each other."
        )
