"""Every private or undocumented name of torch that the library uses, and what happens without it.

Nothing else in the library may import a private name of torch. Each name is looked up when it is
first needed, so that `import fedensemble` and engine `loop` work with a torch that lacks it. A
missing name either has a fallback here or raises `MissingTorchName`; the engine then uses a slower
implementation.

`tests/unit/runtime/test_torch_compat.py` has a test for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class MissingTorchName(Exception):  # noqa: N818 (a condition with a fallback, not an error)
    """The installed torch does not have a private name that is needed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"torch {torch.__version__} has no {name}")


def _find(root: Any, path: str) -> Any:
    """The attribute at a dotted `path` below `root`; raises MissingTorchName if there is none."""
    value = root
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise MissingTorchName(f"{getattr(root, '__name__', root)}.{path}") from None
    return value


# functorch wraps tensors inside `vmap` and `grad`.


def unwrap(tensor: Tensor) -> Tensor:
    """The tensor inside all of functorch's wrappers."""
    functorch = _find(torch._C, "_functorch")
    is_wrapped = _find(functorch, "is_functorch_wrapped_tensor")
    get_unwrapped = _find(functorch, "get_unwrapped")
    while is_wrapped(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def is_batched(tensor: Tensor) -> bool:
    """True inside `vmap`, for a tensor that differs between its batch members.

    Without the private name it is False: an operation that `vmap` cannot batch then raises torch's
    own error instead of ours.
    """
    try:
        return bool(_find(torch._C, "_functorch.is_batchedtensor")(tensor))
    except MissingTorchName:
        return False


def host_array(tensor: Tensor) -> NDArray[np.uint64] | None:
    """The memory of an int64 tensor of at least one dimension as an array.

    None if the tensor has no memory that NumPy can read: on another device, inside `vmap` or a
    trace, or while a mode watches the calls of functions (it would see the conversion).
    """
    is_wrapped, count_modes = _conversion_checks()
    # The modes first: they would see the attributes that are read below, too.
    if count_modes() or type(tensor) is not Tensor or is_wrapped(tensor):
        return None
    if not tensor.is_cpu or tensor.dtype is not torch.int64 or not tensor.dim():
        return None
    return tensor.numpy().view(np.uint64)


@cache
def _conversion_checks() -> tuple[Callable[[Tensor], bool], Callable[[], int]]:
    """What tells that a tensor is wrapped by functorch, and the number of modes that watch calls.

    Without these names every tensor counts as wrapped, and nothing is converted.
    """
    try:
        is_wrapped = _find(torch._C, "_functorch.is_functorch_wrapped_tensor")
        return is_wrapped, _find(torch._C, "_len_torch_function_stack")
    except MissingTorchName:
        return (lambda tensor: True), (lambda: 0)


def is_transformed(tensor: Tensor) -> bool:
    """True inside `vmap` or `torch.func.grad`, for a tensor that stands for others.

    Without the private name it is True: what must not see such a tensor is then not used.
    """
    try:
        return bool(_find(torch._C, "_functorch.is_functorch_wrapped_tensor")(tensor))
    except MissingTorchName:
        return True


def without_function_modes() -> AbstractContextManager[Any]:
    """A context in which no TorchFunctionMode sees what is called.

    Without the private name modes see all calls: a hook of ours then counts as a part of the model.
    """
    try:
        return cast(AbstractContextManager[Any], _find(torch._C, "DisableTorchFunction")())
    except MissingTorchName:
        return nullcontext()


# Identity of a tensor's memory.


def storage_id(tensor: Tensor) -> int:
    """An integer that identifies the memory of a strided tensor until that memory is freed."""
    return int(_find(unwrap(tensor).untyped_storage(), "_cdata"))


def storage_reference(tensor: Tensor) -> Any:
    """A weak reference to a tensor's storage; while it exists, `storage_id` is not used again."""
    from torch.multiprocessing import reductions

    return _find(reductions, "StorageWeakRef")(tensor.untyped_storage())


def version(tensor: Tensor) -> int:
    """How often the tensor was written to in place; 0 if torch does not count."""
    return 0 if tensor.is_inference() else int(getattr(tensor, "_version", 0))


# Modes below autograd.


def dispatch_mode() -> type[Any]:
    """The class TorchDispatchMode."""
    from torch.utils import _python_dispatch

    return _find(_python_dispatch, "TorchDispatchMode")  # type: ignore[no-any-return]


def in_backward() -> bool:
    """True while autograd runs a backward pass."""
    return int(_find(torch._C, "_current_graph_task_id")()) >= 0


def aten(name: str) -> Any:
    """An operator of torch.ops.aten."""
    return _find(torch.ops.aten, name)


def weight_norm() -> Any:
    """The function that nn.utils.parametrizations.weight_norm calls, or None."""
    return getattr(torch, "_weight_norm", None)


# Modules.


def module_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own dictionaries of parameters and buffers, which may be written to.

    nn.Module.__setattr__ accepts only nn.Parameter for the name of a parameter. Training replaces
    parameters by plain tensors, thousands of times per round, so it writes to the dictionaries.
    """
    return module._parameters, module._buffers


def has_forward_hooks(module: nn.Module) -> bool:
    """True if a submodule has forward (pre-)hooks, or if torch's tables of hooks are missing."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    unknown: dict[str, Any] = {"unknown": None}  # not empty: counts as a hook
    # Hooks that are registered for all modules of the process, then those of each submodule.
    tables = [getattr(nn.modules.module, f"_global{name}", unknown) for name in names]
    tables += [getattr(part, name, unknown) for part in module.modules() for name in names]
    return any(len(table) > 0 for table in tables)


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Replaces every parameter, gradient and buffer of a module by `function` of it."""
    module._apply(function)  # type: ignore[no-untyped-call]
    return module


def norm_layers() -> tuple[type[nn.Module], ...]:
    """Layers with running statistics over the examples of a batch: BatchNorm and InstanceNorm."""
    from torch.nn.modules import batchnorm

    base = getattr(batchnorm, "_NormBase", None)
    if base is not None:
        return (base,)
    public = ("BatchNorm", "InstanceNorm")
    names = [f"{kind}{dim}d" for kind in public for dim in (1, 2, 3)] + ["SyncBatchNorm"]
    return tuple(getattr(nn, name) for name in names)


def batch_norm_layers() -> tuple[type[nn.Module], ...]:
    """All kinds of BatchNorm."""
    from torch.nn.modules import batchnorm

    base = getattr(batchnorm, "_BatchNorm", None)
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) if base is None else (base,)
