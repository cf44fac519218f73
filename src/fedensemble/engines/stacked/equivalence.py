"""Whether a model can be folded: tried once on a few examples, for nothing else can tell."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError, first_line
from ...modeling.factory import ModelSpec
from ...modeling.functional_model import FunctionalModel
from ...runtime.oom import out_of_memory
from .data_dependence import looking
from .forward import DECIDES
from .fusion import Fusion, Watch
from .gradient import folded_gradient
from .normalization import NotStackable

_KNOWN: dict[Hashable, Finding] = {}
# How close folding has to come, and how close where rounding grows, as by a million through
# BatchNorm of two examples.
_CLOSE = {torch.float64: (1e-9, 1e-4), torch.float32: (1e-2, 1e-2)}
# a change of weights and examples that shows how it grows, and how often it may
_LAST_DIGITS, _TIMES = 1e-13, 10
# Operations of a forward pass that a trial may cost: one visit's, and those of more than two
# visits.
_WORTH, _WORTH_MORE = 200_000_000, 20_000_000
_MOST = 8


def examples(count: int, batch: int, operations: int) -> Tensor:
    """Which of `count` examples a model is tried on, [J, B]: from all over, as many as are cheap.

    Args:
        batch: of the run; there may be models that do something else with larger ones.
        operations: of one example's forward pass.
    """
    each = max(2, min(batch, _WORTH // max(1, operations)))
    visits = max(2, min(_MOST, _WORTH_MORE // max(1, each * operations)))
    return torch.linspace(0, count - 1, visits * each).round().long().reshape(visits, each)


class Finding(NamedTuple):
    """What a trial told: why a model cannot be folded, or None; and which layers may do what comes
    after them.

    The second is empty if none may, otherwise it says so of each norm and convolution of a pass.
    """

    reason: str | None
    fates: tuple[Fusion, ...] = ()


def check_stackable(learner: FunctionalModel, x: Tensor, y: Tensor) -> Finding:
    """Whether folding gives the gradients of one visit at a time on a few examples, [J, B, ...].

    A module that mixes the examples of a batch in its own code would mix clients when folded: only
    trying tells. What was found for a recipe is remembered, for runs of one table have the same
    model.
    """
    if not isinstance(learner.factory, ModelSpec) or not isinstance(learner.loss_given, str):
        return _run_check(learner, x, y)
    key = (
        learner.factory.key,
        learner.loss_given,
        x.shape,
        x.dtype,
        y.shape[2:],
        y.dtype,
        learner.device,
    )
    if key not in _KNOWN:
        _KNOWN[key] = _run_check(learner, x, y)
    return _KNOWN[key]


def _run_check(
    learner: FunctionalModel, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float64
) -> Finding:
    trial = _EquivalenceCheck(learner, x, y, dtype)
    try:
        got = trial.watched(watch := Watch())
        expected = trial.one_by_one()
    except NotStackable as reason:
        return Finding(str(reason))
    except Exception as error:  # whatever a module raises
        # no folding helps, or it says nothing of the model
        if isinstance(error, InputError) or out_of_memory(error):
            raise
        if dtype != learner.dtype:  # it may hold tensors of its own, such as a loss with weights
            return _run_check(learner, x, y, learner.dtype)
        return Finding(first_line(error))
    if not trial.agree(got, expected) or trial.mixes():
        return Finding("its forward pass mixes the examples of a batch")
    found = watch.found()
    alone: tuple[Fusion, ...] = tuple("" if fate == "sum" else fate for fate in found)
    for fates in dict.fromkeys((found, alone)):
        try:
            if any(fates) and trial.agree(trial.folded(fates=fates), expected):
                return Finding(None, fates)
        except (InputError, NotStackable):
            continue
    return Finding(None)


class _EquivalenceCheck:
    """Gradients of a few visits."""

    def __init__(self, learner: FunctionalModel, x: Tensor, y: Tensor, dtype: torch.dtype) -> None:
        self.learner = FunctionalModel(
            learner.factory, learner.loss_given, y[0], learner.device, dtype
        )
        self.start = self.learner.initial(0, len(x))
        self.x, self.y = (
            values.to(dtype) if values.is_floating_point() else values for values in (x, y)
        )

    def given(self) -> tuple[Tensor, ...]:
        """Arguments of a gradient function."""
        weight = torch.ones(self.x.shape[:2], dtype=torch.bool, device=self.x.device)
        x = self.x.clone()  # a model may write into it
        return *self.start, x, self.y, weight, torch.arange(len(weight), device=weight.device)

    def watched(self, watch: Watch) -> list[Tensor]:
        """As `folded`; raises if the pass decides by numbers, whatever else it raises then."""
        given, loss = self.given(), self.learner.loss
        with looking(given, self.x.shape[:2].numel()) as looks:
            self.learner.loss = looks.of_loss(loss)
            try:
                slope, rest = folded_gradient(self.learner, watch=watch)(*given)
            except Exception as error:
                if not looks.reason or isinstance(error, InputError) or out_of_memory(error):
                    raise
            finally:
                self.learner.loss = loss
        if looks.reason:
            raise NotStackable(looks.reason)
        return [slope, *rest]

    def folded(self, **options: Any) -> list[Tensor]:
        """Slopes, losses and running statistics of all at once."""
        slope, rest = folded_gradient(self.learner, **options)(*self.given())
        return [slope, *rest]

    def one_by_one(self) -> list[Tensor]:
        """The same of one visit at a time."""
        single = [
            self.learner.gradient_function(batched=False)(*one)
            for one in zip(*self.given(), strict=True)
        ]
        return [
            torch.stack(values)
            for values in zip(*((slope, *rest) for slope, rest in single), strict=True)
        ]

    def agree(self, got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
        """Whether these are those, but for rounding: what the last digits of weights and examples
        do to one visit.
        """
        near, most = _CLOSE[self.learner.dtype]
        if _near(got, expected, near) or near == most:
            return _near(got, expected, near)
        if not _near(got, expected, most):
            return False
        (theta, buffers), x, generator = self.start, self.x, torch.Generator().manual_seed(0)
        self.start = theta + _LAST_DIGITS * _noise(theta, generator), buffers
        self.x = x + _LAST_DIGITS * x * _noise(x, generator) if x.is_floating_point() else x
        try:
            return _near(got, expected, _TIMES * _apart(self.one_by_one(), expected))
        finally:
            self.start, self.x = (theta, buffers), x

    def mixes(self) -> bool:
        """Whether folding shows on examples that differ where the given ones may not, some of
        numbers far from 0.
        """
        before, self.x = self.x, _perturb(self.x)
        try:
            return not self.agree(self.folded(), self.one_by_one())
        except Exception as error:  # the model may well refuse them
            if out_of_memory(error):
                raise
            return False
        finally:
            self.x = before


def _perturb(x: Tensor) -> Tensor:
    """Examples [J, B, ...] unlike these: others with noise, or with tokens that others have at the
    same place.
    """
    generator = torch.Generator().manual_seed(0)
    if x.is_floating_point():
        scale = torch.linspace(1, 10, x.shape[:2].numel(), dtype=x.dtype, device=x.device)
        return (x + _noise(x, generator)) * scale.reshape(*x.shape[:2], *(1,) * (x.dim() - 2))
    rows = x.flatten(0, 1)
    order = torch.rand(rows.shape, generator=generator).argsort(0).to(x.device)
    return rows.gather(0, order).reshape(x.shape)


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def _near(got: Sequence[Tensor], expected: Sequence[Tensor], near: float) -> bool:
    """Whether these are those; where both are nan, as with a norm of zeros, nothing speaks against
    folding.
    """
    for found, wanted in zip(got, expected, strict=True):
        for a, b in zip(found, wanted, strict=True):
            if b.numel() and not float((a - b).abs().max()) <= near * (1 + float(b.abs().max())):
                same = (a == b) | (a.isnan() & b.isnan())
                close = (a - b).abs() <= near * (1 + b.nan_to_num(0, 0, 0).abs().max())
                if not bool((same | close).all()):
                    return False
    return True


def _apart(moved: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """How far these are from those at most, by the measure of `_near`."""
    pairs = [
        pair
        for both in zip(moved, expected, strict=True)
        for pair in zip(*both, strict=True)
        if pair[1].numel()
    ]
    differences = [
        (a - b).nan_to_num(0, 0, 0).abs().max() / (1 + b.nan_to_num(0, 0, 0).abs().max())
        for a, b in pairs
    ]
    return max(map(float, differences), default=0.0)


def check_vmap(learner: FunctionalModel, x: Tensor, y: Tensor, reason: str) -> None:
    """Raises if `vmap` cannot batch the model, either; `reason` is why it cannot be folded."""
    try:
        trial = _EquivalenceCheck(learner, x, y, learner.dtype)
        trial.learner.gradient_function(batched=True)(*trial.given())
    except Exception as error:  # whatever a module raises
        if isinstance(error, InputError) or out_of_memory(error):
            raise
        said = first_line(error).partition(". ")[0].removeprefix("vmap: ")
        write = " Or write it with torch.where, without .item() and without `if` on numbers." * (
            DECIDES in reason
        )
        raise InputError(
            f"The model cannot be trained on many clients at once: {reason.rstrip('.')}. By vmap neither: {said}. Use "
            f"engine 'loop', which can.{write}"
        ) from None
