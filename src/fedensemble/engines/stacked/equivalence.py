"""Checks on a few examples that a stacked pass gives the gradients of single passes.

No static analysis can tell whether a module mixes the examples of a batch, so the check runs the
model: J visits stacked, J visits one at a time, the same with perturbed examples, and once more
with fused norms. It runs in float64, where only real differences exceed the tolerance.

Whole engines are compared with engine "loop" by `testing/engine.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError, first_line
from ...modeling.factory import ModelSpec
from ...modeling.functional_model import FunctionalModel
from ...runtime.oom import out_of_memory
from ...runtime.torch_compat import MissingTorchName, has_forward_hooks
from .call_log import Call, record_calls
from .errors import CALLS_CHANGE, CONTROL_FLOW, MIXES_EXAMPLES, PATH_CHANGED, NotStackable
from .fusion import Fusion, FusionTracer
from .gradient import stacked_gradient

_CACHE: dict[Hashable, StackingReport] = {}
# (tolerance, fallback tolerance). BatchNorm over two examples amplifies rounding errors by about
# 1e6; the fallback needs the amplification to be measured, see `_EquivalenceCheck.matches`.
_TOLERANCE = {torch.float64: (1e-9, 1e-4), torch.float32: (1e-2, 1e-2)}
_PERTURBATION, _AMPLIFICATION = 1e-13, 10
# FLOPs of a forward pass that the check may cost: for the examples of one visit, and in all.
_MAX_VISIT_FLOPS, _MAX_FLOPS = 200_000_000, 20_000_000
# Few, because each costs two single passes. Not a power of two: J * B would often equal another
# dimension of the model, such as a sequence length, which would hide lookups without a batch.
_MAX_VISITS = 5


def choose_examples(count: int, batch: int, flops: int) -> Tensor:
    """Indices of the examples to check with, [J, B]: from all clients, as many as are cheap.

    Args:
        count: number of examples.
        batch: batch size of the run; a model may treat larger batches in another way.
        flops: of one example's forward pass.
    """
    per_visit = max(2, min(batch, _MAX_VISIT_FLOPS // max(1, flops)))
    visits = max(2, min(_MAX_VISITS, _MAX_FLOPS // max(1, per_visit * flops)))
    places = torch.linspace(0, count - 1, visits * per_visit)
    return places.round().long().reshape(visits, per_visit)


class StackingReport(NamedTuple):
    """The result of the check."""

    reason: str | None  # why the model cannot be stacked, or None
    fusions: tuple[Fusion, ...] = ()  # of each norm, or empty if nothing is fused
    # The calls of the pass, None for those that need not be known; None if no parameter is used
    # outside of layers.
    calls: tuple[Call | None, ...] | None = None


def check_stackable(model: FunctionalModel, x: Tensor, y: Tensor) -> StackingReport:
    """Compares a stacked pass with single passes on a few examples, [J, B, ...].

    The result is cached per model spec, because the runs of one table have the same model.
    """
    if not isinstance(model.factory, ModelSpec) or not isinstance(model.user_loss, str):
        return _run_check(model, x, y)
    shapes = (x.shape, x.dtype, y.shape[2:], y.dtype)
    key = (model.factory.key, model.user_loss, shapes, model.device)
    if key not in _CACHE:
        _CACHE[key] = _run_check(model, x, y)
    return _CACHE[key]


def _run_check(
    model: FunctionalModel, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float64
) -> StackingReport:
    """Tries a stacked pass, and if it fails one that also runs parameters outside of layers."""
    check = _EquivalenceCheck(model, x, y, dtype)
    try:
        return _try_stacking(check)
    except NotStackable as error:
        reason = error
    if CONTROL_FLOW not in str(reason):
        try:
            with _module_errors():
                calls = check.record_calls()
            return _try_stacking(check, calls)
        except NotStackable as error:
            reason = error
    if isinstance(reason, _PassFailed) and dtype != model.dtype:
        # The module may hold float32 tensors, such as class weights.
        return _run_check(model, x, y, model.dtype)
    return StackingReport(str(reason))


def _try_stacking(
    check: _EquivalenceCheck, calls: tuple[Call | None, ...] | None = None
) -> StackingReport:
    """The report of a model that can be stacked; raises NotStackable for others."""
    with _module_errors():
        stacked = check.run_traced(tracer := FusionTracer(), calls, needed := set[int]())
        expected = check.run_single()
    if calls is not None:
        calls = tuple(call if n in needed else None for n, call in enumerate(calls))
    if not check.matches(stacked, expected) or check.mixes_examples(calls):
        raise NotStackable(MIXES_EXAMPLES)
    if has_forward_hooks(check.model.training_model):
        # A hook would see the intermediate values of a fused pass.
        return StackingReport(None, calls=calls)
    return StackingReport(None, check.find_fusions(tracer.fusions(), expected, calls), calls)


class _PassFailed(NotStackable):
    """The module raised an error of its own."""


@contextmanager
def _module_errors() -> Iterator[None]:
    """Raises errors of the module as NotStackable.

    Errors of the user's input are the same on every engine, and running out of memory says nothing
    about the model: these are raised as they are.
    """
    try:
        yield
    except (NotStackable, MissingTorchName) as reason:
        raise NotStackable(str(reason)) from reason
    except Exception as error:  # a module may raise anything
        if str(error) == PATH_CHANGED:
            raise NotStackable(CALLS_CHANGE) from error
        if out_of_memory(error) or isinstance(error, InputError):
            raise
        raise _PassFailed(first_line(error)) from error


class _EquivalenceCheck:
    """Gradients of a few visits, stacked and one at a time."""

    def __init__(self, model: FunctionalModel, x: Tensor, y: Tensor, dtype: torch.dtype) -> None:
        self.model = FunctionalModel(model.factory, model.user_loss, y[0], model.device, dtype)
        # One built module is enough: noise makes the models of the visits differ. Buffers are the
        # same for all visits, as those of new modules are.
        theta, buffers = self.model.flatten_module(self.model.training_model)
        generator = torch.Generator().manual_seed(0)
        thetas = theta.repeat(len(x), 1)
        scale = 0.1 * theta.square().mean().sqrt()
        self.start = thetas + scale * _noise(thetas, generator), buffers.repeat(len(x), 1)
        self.x = x.to(dtype) if x.is_floating_point() else x
        self.y = y.to(dtype) if y.is_floating_point() else y

    def arguments(self) -> tuple[Tensor, ...]:
        """Arguments of a gradient function."""
        weight = torch.ones(self.x.shape[:2], dtype=torch.bool, device=self.x.device)
        keys = torch.arange(len(weight), device=weight.device)
        return *self.start, self.x.clone(), self.y, weight, keys  # a model may write to its inputs

    def record_calls(self) -> tuple[Call, ...]:
        """The calls of a pass of the first visit."""
        thetas, buffers = self.start
        return record_calls(
            self.model, thetas[0], buffers[0], self.x.flatten(0, 1), self.x.shape[1]
        )

    def run_traced(
        self, tracer: FusionTracer, calls: tuple[Call | None, ...] | None, needed: set[int]
    ) -> list[Tensor]:
        """As `run_stacked`; raises NotStackable if the pass has data-dependent control flow."""
        # Imported here because it needs private names of torch.
        from .data_dependence import detect_data_dependence

        arguments, loss = self.arguments(), self.model.loss
        size = self.x.shape[:2].numel()
        with detect_data_dependence(
            arguments, size, constant_lookups=calls is not None
        ) as detector:
            self.model.loss = detector.wrap_loss(loss)
            try:
                gradient = stacked_gradient(self.model, tracer=tracer, calls=calls, needed=needed)
                grad, rest = gradient(*arguments)
            except Exception as error:
                # An error that follows from reading values is reported as what caused it.
                if not detector.reason or isinstance(error, InputError) or out_of_memory(error):
                    raise
            finally:
                self.model.loss = loss
        if detector.reason:
            raise NotStackable(detector.reason)
        return [grad, *rest]

    def run_stacked(self, **options: Any) -> list[Tensor]:
        """Gradients, losses and running statistics of all visits from one pass."""
        grad, rest = stacked_gradient(self.model, **options)(*self.arguments())
        return [grad, *rest]

    def run_single(self) -> list[Tensor]:
        """Gradients, losses and running statistics from one pass per visit."""
        gradient = self.model.gradient_function(batched=False)
        results = [gradient(*visit) for visit in zip(*self.arguments(), strict=True)]
        columns = zip(*((grad, *rest) for grad, rest in results), strict=True)
        return [torch.stack(values) for values in columns]

    def find_fusions(
        self,
        traced: tuple[Fusion, ...],
        expected: Sequence[Tensor],
        calls: tuple[Call | None, ...] | None,
    ) -> tuple[Fusion, ...]:
        """The traced fusions, or those without additions, whichever gives equal gradients."""
        without_add: tuple[Fusion, ...] = tuple("" if f == "add_relu" else f for f in traced)
        for fusions in dict.fromkeys((traced, without_add)):
            try:
                if not any(fusions):
                    continue
                if self.matches(self.run_stacked(fusions=fusions, calls=calls), expected):
                    return fusions
            except (InputError, NotStackable):
                continue
        return ()

    def matches(self, results: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
        """True if results are equal up to rounding.

        Where the difference lies between the two tolerances, rounding errors may have been
        amplified. How much is measured: parameters and examples are perturbed in their last digits,
        and the difference may be a few times what that does to single passes.
        """
        tolerance, fallback = _TOLERANCE[self.model.dtype]
        if _are_close(results, expected, tolerance) or tolerance == fallback:
            return _are_close(results, expected, tolerance)
        if not _are_close(results, expected, fallback):
            return False
        (theta, buffers), x, generator = self.start, self.x, torch.Generator().manual_seed(0)
        self.start = theta + _PERTURBATION * _noise(theta, generator), buffers
        self.x = x + _PERTURBATION * x * _noise(x, generator) if x.is_floating_point() else x
        try:
            amplified = _max_difference(self.run_single(), expected)
            return _are_close(results, expected, _AMPLIFICATION * amplified)
        finally:
            self.start, self.x = (theta, buffers), x

    def mixes_examples(self, calls: tuple[Call | None, ...] | None) -> bool:
        """True if stacked and single passes differ on perturbed examples.

        The first examples of a data set may be equal where it matters (all black corners, one
        class), which would hide that a module mixes them.
        """
        before, self.x = self.x, _perturb(self.x)
        try:
            return not self.matches(self.run_stacked(calls=calls), self.run_single())
        except Exception as error:  # the model may reject such examples
            if out_of_memory(error):
                raise
            return False
        finally:
            self.x = before


def _perturb(x: Tensor) -> Tensor:
    """Examples [J, B, ...] with noise and other scales, or with tokens of other examples."""
    generator = torch.Generator().manual_seed(0)
    if x.is_floating_point():
        scale = torch.linspace(1, 10, x.shape[:2].numel(), dtype=x.dtype, device=x.device)
        return (x + _noise(x, generator)) * scale.reshape(*x.shape[:2], *(1,) * (x.dim() - 2))
    rows = x.flatten(0, 1)
    order = torch.rand(rows.shape, generator=generator).argsort(0).to(x.device)
    return rows.gather(0, order).reshape(x.shape)


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def _are_close(results: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> bool:
    """True if all values are close, relative to the largest; NaN equals NaN (a norm of zeros)."""
    for result, wanted in zip(results, expected, strict=True):
        for a, b in zip(result, wanted, strict=True):
            limit = tolerance * (1 + float(b.abs().max())) if b.numel() else 0.0
            if b.numel() and not float((a - b).abs().max()) <= limit:
                same = (a == b) | (a.isnan() & b.isnan())
                close = (a - b).abs() <= tolerance * (1 + b.nan_to_num(0, 0, 0).abs().max())
                if not bool((same | close).all()):
                    return False
    return True


def _max_difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference by the measure of `_are_close`."""
    pairs = [
        pair
        for both in zip(results, expected, strict=True)
        for pair in zip(*both, strict=True)
        if pair[1].numel()
    ]
    differences = [
        (a - b).nan_to_num(0, 0, 0).abs().max() / (1 + b.nan_to_num(0, 0, 0).abs().max())
        for a, b in pairs
    ]
    return max(map(float, differences), default=0.0)


def check_vmap(model: FunctionalModel, x: Tensor, y: Tensor, reason: str) -> None:
    """Raises if `vmap` cannot batch the model either; `reason` is why it cannot be stacked."""
    try:
        check = _EquivalenceCheck(model, x, y, model.dtype)
        check.model.gradient_function(batched=True)(*check.arguments())
    except Exception as error:  # a module may raise anything
        if isinstance(error, InputError) or out_of_memory(error):
            raise
        cause = first_line(error).partition(". ")[0].removeprefix("vmap: ")
        advice = " Or write it with torch.where, without .item() and without `if` on values."
        raise InputError(
            "The model cannot be trained on many clients at once: "
            f"{reason.rstrip('.')}. vmap cannot batch it either: {cause}. Use engine 'loop', which "
            f"can train it.{advice * (CONTROL_FLOW in reason)}"
        ) from None
