"""Detects data-dependent control flow (`if x.max() > 1`, `.item()`, `x[x > 0]`) in a forward pass.

In a stacked pass the examples of all clients are one batch, so that a decision which depends on
tensor values would be taken for all clients at once, and training would silently be wrong. A
TorchDispatchMode sees every operator below autograd, whatever Python code called it, and torch tags
operators whose Python result or output shape depends on values. A TorchFunctionMode adds the calls
that reach no operator, such as `.tolist()` and `.shape`.

The module needs private names of torch; importing it raises `MissingTorchName` without them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...flat_params import tensor_leaves
from ...runtime.torch_compat import (
    aten,
    dispatch_mode,
    in_backward,
    storage_id,
    storage_reference,
)
from .errors import CONTROL_FLOW, LOOKUP

_MASKED_READS = {aten("index"), aten("masked_select")}
_MASKED_WRITES = {
    aten("index_put"),
    aten("index_put_"),
    aten("masked_scatter"),
    aten("masked_scatter_"),
}
_COPIES = {aten("clone"), aten("detach"), aten("alias"), aten("_to_copy")}
_UNINITIALIZED = {aten("empty"), aten("empty_strided")}
# Functions that hand values to Python without an operator.
_SPLITS = {torch.tensor_split, Tensor.tensor_split}  # by their second argument
_TAKE_VALUES = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, *_SPLITS}
_SHAPE: Any = Tensor.shape
_SIZES = {_SHAPE.__get__, Tensor.size, Tensor.numel, Tensor.nelement, torch.numel, Tensor.__len__}
# Functions in which torch itself reads values, to validate or to print them.
_VALIDATING = {F.gaussian_nll_loss, F.ctc_loss, torch.ctc_loss, Tensor.__format__}

_DispatchMode: Any = dispatch_mode()


class DataDependenceDetector(_DispatchMode):  # type: ignore[misc]
    """While active, finds values of a batch that become Python values or the size of a tensor.

    Tensors that are not computed from `inputs` are constants, whose values a pass may read. What a
    mask selects may be computed with elementwise and written back with the mask: its size then
    decides nothing.

    Args:
        inputs: what the pass gets: parameters, examples, targets.
        size: number of examples.
        constant_lookups: allows embeddings of constants, such as positions.
    """

    def __init__(self, inputs: Iterable[Tensor], size: int, constant_lookups: bool = False) -> None:
        super().__init__()
        self.reason, self.size, self.constant_lookups = "", size, constant_lookups
        self.modes = ExitStack()
        self.validating = False  # True while torch itself reads values
        self._place = "forward pass"
        # Storages by their address. The weak references keep an address from being reused.
        self._data: dict[int, Any] = {}  # computed from the inputs
        self._data_sized: dict[int, Any] = {}  # with a size that depends on values
        _mark(self._data, inputs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default is True, for which torch imports torch._dynamo; that takes a second.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = tensor_leaves((args, kwargs))
        if self.depends_on_data(inputs):
            if not self.validating and not in_backward():
                self._inspect(func, args, inputs, out)
            _mark(self._data, tensor_leaves(out))
        elif func.overloadpacket in _UNINITIALIZED:  # a kernel may fill it with anything
            _mark(self._data, tensor_leaves(out))
        return out

    def _inspect(self, func: Any, args: Any, inputs: list[Tensor], out: Any) -> None:
        operator, tags = func.overloadpacket, func.tags
        constant_lookup = operator is aten("embedding") and not self.depends_on_data(args[1:2])
        if constant_lookup and args[1].numel() % self.size and not self.constant_lookups:
            self.reason = self.reason or LOOKUP
        elif torch.Tag.data_dependent_output in tags:
            self.flag()
        elif torch.Tag.dynamic_output_shape in tags:
            masked = operator in _MASKED_READS
            masks = [t for t in tensor_leaves(args[1:]) if t.dtype in (torch.bool, torch.uint8)]
            if self.depends_on_data(masks if masked else inputs):
                _mark(self._data_sized, tensor_leaves(out)) if masked else self.flag()
        elif operator not in _MASKED_WRITES and self.has_data_size(inputs):
            elementwise = torch.Tag.pointwise in tags or operator in _COPIES
            _mark(self._data_sized, tensor_leaves(out)) if elementwise else self.flag()

    def depends_on_data(self, values: Iterable[Tensor]) -> bool:
        """True if any tensor is computed from the inputs; sparse tensors always count as such."""
        return any(v.layout != torch.strided or storage_id(v) in self._data for v in values)

    def has_data_size(self, values: Iterable[Tensor]) -> bool:
        """True if the size of any tensor depends on values of the inputs."""
        return any(v.layout == torch.strided and storage_id(v) in self._data_sized for v in values)

    def flag(self) -> None:
        """Notes that a value was read."""
        examples = "such as `if x.max() > 1`, x.item() or x[x > 0]"
        self.reason = self.reason or f"its {self._place} {CONTROL_FLOW}, {examples}"

    def wrap_loss(
        self, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """The same loss, named as the place of what is found in it.

        The detector is active until the loss ends: the backward pass is torch's own code.
        """

        def watched_loss(outputs: Tensor, targets: Tensor) -> Tensor:
            self._place = "loss"
            with self.modes:
                return loss(outputs, targets)

        return watched_loss


class _CallTracer(TorchFunctionMode):
    """Tells the detector of calls that reach no operator, and of torch's own validation."""

    def __init__(self, detector: DataDependenceDetector) -> None:
        super().__init__()
        self.detector = detector

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self.detector.validating
        validating = func in _VALIDATING or _is_validation(func, args, kwargs, sys._getframe(1))
        self.detector.validating = before or validating
        try:
            if not self.detector.validating and self._reads_values(func, args, kwargs):
                self.detector.flag()
            return func(*args, **kwargs)
        finally:
            self.detector.validating = before

    def _reads_values(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func in _SIZES:
            return self.detector.has_data_size(tensor_leaves((args, kwargs)))
        values = tensor_leaves((args[func in _SPLITS :], kwargs))
        return func in _TAKE_VALUES and self.detector.depends_on_data(values)


def _is_validation(func: Any, args: Any, kwargs: Any, frame: Any) -> bool:
    """True for one_hot with known classes, and where torch.distributions checks its arguments."""
    if func is F.one_hot:
        return int(kwargs.get("num_classes", args[1] if len(args) > 1 else -1)) >= 0
    module = str(frame.f_globals.get("__name__"))
    return func is Tensor.__bool__ and module.startswith("torch.distributions.")


@contextmanager
def detect_data_dependence(
    inputs: Iterable[Tensor], size: int, constant_lookups: bool = False
) -> Iterator[DataDependenceDetector]:
    """Watches what is done with the input tensors, of `size` examples, inside the context."""
    detector = DataDependenceDetector(inputs, size, constant_lookups)
    with detector.modes:
        detector.modes.enter_context(detector)
        detector.modes.enter_context(_CallTracer(detector))
        yield detector


def _mark(known: dict[int, Any], values: Iterable[Tensor]) -> None:
    for value in values:
        if value.layout == torch.strided and storage_id(value) not in known:
            known[storage_id(value)] = storage_reference(value)
