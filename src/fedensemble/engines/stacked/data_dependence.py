"""Whether a pass lets the numbers of a batch decide: seen where torch computes, whatever Python
wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .forward import DECIDES, LOOKUP

_ATEN = torch.ops.aten
_BY_MASK = {_ATEN.index, _ATEN.masked_select}
_PUT_BACK = {_ATEN.index_put, _ATEN.index_put_, _ATEN.masked_scatter, _ATEN.masked_scatter_}
_COPIES = {_ATEN.clone, _ATEN.detach, _ATEN.alias, _ATEN._to_copy}
_UNFILLED = {_ATEN.empty, _ATEN.empty_strided}
# Numbers that leave without an operation of torch's, and those that it reads only to check or to
# print them.
_SPLITS = {torch.tensor_split, Tensor.tensor_split}  # where the second argument says
_TAKEN = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, *_SPLITS}
_SHAPE: Any = Tensor.shape
_SIZES = {_SHAPE.__get__, Tensor.size, Tensor.numel, Tensor.nelement, torch.numel, Tensor.__len__}
_CHECKING = {F.gaussian_nll_loss, F.ctc_loss, torch.ctc_loss, Tensor.__format__}


class DataDependenceDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, finds numbers of a batch that become Python's, or the size of a tensor.

    Tensors that do not come from the given ones are constants, of which a pass may know what it
    likes. What a mask picks may be computed with number by number and put back: its size then
    decides nothing.

    Args:
        given: what a pass gets: weights, examples, targets.
        size: how many examples.
    """

    def __init__(self, given: Iterable[Tensor], size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason, self.size = "", size
        self.modes = ExitStack()
        self.checking = False  # whether torch itself asks, to raise an error if it must
        self._place = "forward pass"
        # By the address of their memory, which nobody else gets while a reference to it is held,
        # even a weak one:
        self._data: dict[int, StorageWeakRef] = {}
        self._sized: dict[int, StorageWeakRef] = {}  # those whose size the data made
        _mark(self._data, given)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would load it, for a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        if self.depends(given):
            # slopes are torch's own business
            if not self.checking and torch._C._current_graph_task_id() < 0:
                self._see(func, args, given, out)
            _mark(self._data, _tensors(out))
        elif func.overloadpacket in _UNFILLED:  # a kernel may fill it
            _mark(self._data, _tensors(out))
        return out

    def _see(self, func: Any, args: Any, given: list[Tensor], out: Any) -> None:
        kind, tags = func.overloadpacket, func.tags
        if kind is _ATEN.embedding and not self.depends(args[1:2]) and args[1].numel() % self.size:
            self.reason = self.reason or LOOKUP
        elif torch.Tag.data_dependent_output in tags:
            self.look()
        elif torch.Tag.dynamic_output_shape in tags:
            masks = (
                [t for t in _tensors(args[1:]) if t.dtype in (torch.bool, torch.uint8)]
                if kind in _BY_MASK
                else given
            )
            if self.depends(masks):
                _mark(self._sized, _tensors(out)) if kind in _BY_MASK else self.look()
        elif kind not in _PUT_BACK and self.sized(given):
            _mark(
                self._sized, _tensors(out)
            ) if torch.Tag.pointwise in tags or kind in _COPIES else self.look()

    def depends(self, values: Iterable[Tensor]) -> bool:
        """Whether any of these comes from what was given; a sparse one may always."""
        return any(
            value.layout != torch.strided or _address(value) in self._data for value in values
        )

    def sized(self, values: Iterable[Tensor]) -> bool:
        """Whether the size of any of these comes from numbers that were given."""
        return any(
            value.layout == torch.strided and _address(value) in self._sized for value in values
        )

    def look(self) -> None:
        """Notes that a number was looked at."""
        self.reason = (
            self.reason
            or f"its {self._place} {DECIDES}, such as `if x.max() > 1`, x.item() or x[x > 0]"
        )

    def of_loss(
        self, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """The same loss, which is then said to be what looked; it is the last to be watched, slopes
        are not.
        """

        def watched(outputs: Tensor, targets: Tensor) -> Tensor:
            self._place = "loss"
            with self.modes:
                return loss(outputs, targets)

        return watched


class _CallTracer(TorchFunctionMode):
    """Tells `DataDependenceDetector` what no operation shows: numbers taken as they lie, and
    torch's own checks.
    """

    def __init__(self, looks: DataDependenceDetector) -> None:
        super().__init__()
        self.looks = looks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self.looks.checking
        self.looks.checking = (
            before or func in _CHECKING or _is_check(func, args, kwargs, sys._getframe(1))
        )
        try:
            if not self.looks.checking and self._tells(func, args, kwargs):
                self.looks.look()
            return func(*args, **kwargs)
        finally:
            self.looks.checking = before

    def _tells(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func in _SIZES:
            return self.looks.sized(_tensors((args, kwargs)))
        return func in _TAKEN and self.looks.depends(_tensors((args[func in _SPLITS :], kwargs)))


def _is_check(func: Any, args: Any, kwargs: Any, frame: Any) -> bool:
    """Whether it is one-hot numbers of known classes, or a question of torch.distributions' about
    its arguments.
    """
    if func is F.one_hot:
        return int(kwargs.get("num_classes", args[1] if len(args) > 1 else -1)) >= 0
    return func is Tensor.__bool__ and str(frame.f_globals.get("__name__")).startswith(
        "torch.distributions."
    )


@contextmanager
def looking(given: Iterable[Tensor], size: int) -> Iterator[DataDependenceDetector]:
    """Within it, what is done with the given tensors, of `size` examples, is watched."""
    looks = DataDependenceDetector(given, size)
    with looks.modes:
        looks.modes.enter_context(looks)
        looks.modes.enter_context(_CallTracer(looks))
        yield looks


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _mark(known: dict[int, StorageWeakRef], values: Iterable[Tensor]) -> None:
    for value in values:
        if value.layout == torch.strided and _address(value) not in known:
            known[_address(value)] = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]


def _address(value: Tensor) -> int:
    while is_functorch_wrapped_tensor(value):  # within `vmap` or `grad`
        value = get_unwrapped(value)
    return int(value.untyped_storage()._cdata)
