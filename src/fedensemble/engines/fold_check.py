"""Whether a model can be folded: tried once on a few examples, for nothing else can tell."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.learner import Learner, Recipe
from ..errors import InputError
from .folded_gradient import folded_gradient
from .folded_norms import NotFoldable
from .rectified import Fate, Watch

_KNOWN: dict[Hashable, Finding] = {}
_CLOSE = 1e-4  # float64 rounding stays far below even through BatchNorm of two examples, a mix-up lies far above


def _few(learner: Learner, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Arguments of a gradient function for three visits of two examples each."""
    visits, batch = 3, 2
    theta, buffers = learner.initial(0, visits)
    index = torch.arange(visits * batch, device=x.device) % len(x)
    given = (values[index].reshape(visits, batch, *values.shape[1:]) for values in (x, y))
    weight = torch.ones(visits, batch, dtype=torch.bool, device=x.device)
    return theta, buffers, *given, weight, torch.arange(visits, device=x.device)


class Finding(NamedTuple):
    """What a trial told: why a model cannot be folded, or None; and which BatchNorms may do what comes after them.

    The second is empty if none may, otherwise it says so of each BatchNorm of a pass.
    """

    reason: str | None
    rectified: tuple[Fate, ...] = ()


def can_fold(learner: Learner, x: Tensor, y: Tensor) -> Finding:
    """Whether folding gives the gradients of one visit at a time on a few examples.

    A module that mixes the examples of a batch in its own code would mix clients when folded: only trying tells. What
    was found for a recipe is remembered, for runs of one table have the same model.
    """
    if not isinstance(learner.factory, Recipe) or not isinstance(learner.loss_given, str):
        return _tried(learner, x, y)
    key = (learner.factory.key, learner.loss_given, x.shape[1:], x.dtype, y.shape[1:], y.dtype, learner.device)
    if key not in _KNOWN:
        _KNOWN[key] = _tried(learner, x, y)
    return _KNOWN[key]


def _tried(learner: Learner, x: Tensor, y: Tensor) -> Finding:
    learner = Learner(learner.factory, learner.loss_given, y, learner.device, torch.float64)
    x, y = (values.double() if values.is_floating_point() else values for values in (x, y))
    try:
        got = folded_gradient(learner, watch=(watch := Watch()))(*_few(learner, x, y))
        single = [learner.gradient_function(batched=False)(*one) for one in zip(*_few(learner, x, y), strict=True)]
    except NotFoldable as reason:
        return Finding(str(reason))
    except torch.OutOfMemoryError:  # says nothing of the model
        raise
    except RuntimeError as error:
        return Finding(str(error).splitlines()[0])
    expected = [torch.stack(v) for v in zip(*((slope, *rest) for slope, rest in single), strict=True)]
    if not _near(got, expected):
        return Finding("its forward pass mixes the examples of a batch")
    found = watch.found()
    alone: tuple[Fate, ...] = tuple("relu" if fate == "relu" else "" for fate in found)
    for rectified in dict.fromkeys((found, alone)):
        try:
            if any(rectified) and _near(folded_gradient(learner, rectified=rectified)(*_few(learner, x, y)), expected):
                return Finding(None, rectified)
        except (InputError, NotFoldable):
            continue
    return Finding(None)


def _near(got: tuple[Tensor, tuple[Tensor, Tensor]], expected: Sequence[Tensor]) -> bool:
    """Whether slopes, losses and running statistics are those expected."""
    pairs = zip((got[0], *got[1]), expected, strict=True)
    # "Not further": where both are nan, as with a norm of zeros, nothing speaks against folding.
    return not any(a.numel() and float((a - b).abs().max()) > _CLOSE * (1 + float(b.abs().max())) for a, b in pairs)


def check_vmap(learner: Learner, x: Tensor, y: Tensor, reason: str) -> None:
    """Raises if `vmap` cannot batch the model, either; `reason` is why it cannot be folded."""
    try:
        learner.gradient_function(batched=True)(*_few(learner, x, y))
    except RuntimeError as error:
        said = str(error).splitlines()[0].partition(". ")[0]
        raise InputError(
            f"The model cannot be trained on many clients at once: {reason}. (By vmap: {said}.) Use engine 'loop', or "
            "write it without .item() and without decisions that depend on data."
        ) from None
