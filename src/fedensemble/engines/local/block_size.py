"""Chooses the block size: how many visits fit into memory at once.

The memory of one visit is measured (GPU) or estimated (CPU) on a few examples before training.
If a block does not fit after all, `oom_retry.py` halves the block size and trains it again.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...errors import setting
from ...modeling.factory import ModelSpec
from ...modeling.functional_model import GradientFn
from ...runtime.num_threads import num_threads
from ...runtime.oom import (
    OOM_ERRORS,
    advise_smaller_visit,
    format_gib,
    memory_report,
    oom_error,
    out_of_memory,
)
from ...runtime.torch_compat import without_function_modes
from ..stacked.gradient import stacked_gradient

if TYPE_CHECKING:
    from .vector import VectorEngine

# Copies of a visit's parameters that are alive at once: broadcast, current point, gradient,
# optimizer state, upload, client state, and the new values of these.
_COPIES = 10
_GIB = 1 << 30
_CPU_BUDGET = 4  # GiB
_GPU_FRACTION = 0.6  # of the memory that this process could have
_MAX_VISITS = {"cpu": 64, "cuda": 4096}
# 64 visits on a CPU are enough to hide the cost of calling functions, unless visits are tiny. Those
# may fill the cache: a step of 1,000 visits of 100 weights takes as long as two steps of 64.
_TINY_VISIT, _MAX_TINY_VISITS, _CACHE = 32 << 10, 4096, 32 << 20
_FEW = 2  # examples of the estimate on a CPU, which is made for _FEW and 2 * _FEW examples
_UNKNOWN = _GIB  # bytes per visit that are assumed where nothing can be measured
_ACTIVATIONS: dict[Hashable, int] = {}  # results of `activations`
# Gradients of activations that are alive at once in the backward pass, in units of the largest
# saved tensor: those of the input and output of one operation, and its workspace.
_LIVE_GRADS = 3


def max_block_size(engine: VectorEngine, budget: float | None) -> int:
    """The number of visits that fit into a budget in GiB (None: the default of the device).

    If not even one visit fits, the result is 1 and the engine's notes say so.
    """
    model, cuda = engine.model, engine.model.device.type == "cuda"
    param_bytes = model.theta_layout.total * model.dtype.itemsize
    most, needed = _MAX_VISITS["cuda" if cuda else "cpu"], _COPIES * param_bytes
    available = (budget if budget is not None else _CPU_BUDGET) * _GIB
    if cuda and budget is None:
        available = _gpu_budget(engine)
    if available >= needed:
        engine.activation_bytes = activations(engine)
        needed += engine.activation_bytes
    if available < needed:
        engine.notes.append(
            f"One visit needs about {format_gib(needed)}, more than the memory budget of "
            f"{format_gib(available)}: visits are trained one by one, and may take more than the "
            "budget."
        )
    if not cuda and needed <= _TINY_VISIT:
        most = min(_MAX_TINY_VISITS, _CACHE // needed)
    visits = int(max(1, min(most, available // needed)))
    return _round_down(visits) if cuda else visits


# The block size decides in which order floating-point sums are taken, and thus the last bits of
# results. It should therefore be the same at every start on the same machine. That is why the
# budget of a GPU follows from its total memory and not from what happens to be free, and why the
# measured size is rounded down coarsely. Checkpoints also store the history of block sizes, see
# `VectorEngine.numerics`.
def _gpu_budget(engine: VectorEngine) -> float:
    """Bytes for a block: a fraction of the GPU's memory minus what this process already holds.

    If other programs leave less than that, the budget follows from what is free, and the engine's
    notes say so.
    """
    device = engine.model.device
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    # Memory that torch's allocator has reserved but not allocated is free for this process.
    budget, free = _GPU_FRACTION * (total - allocated), free + reserved - allocated
    if budget <= free:
        return budget
    engine.notes.append(
        f"Other programs leave only {format_gib(free)} of the {format_gib(total)} of {device}: "
        "blocks are sized for that, and the last digits of results may differ from those on an "
        f"idle GPU. To repeat them, set {setting('engine.options.block')}."
    )
    return _GPU_FRACTION * free


def _round_down(visits: int) -> int:
    """Rounds down to three significant binary digits, to absorb noise in the measured memory.

    >>> [_round_down(n) for n in (1, 7, 9, 100, 4096)]
    [1, 7, 8, 96, 4096]
    """
    step = 1 << max(0, visits.bit_length() - 3)
    return visits - visits % step


def activations(engine: VectorEngine) -> int:
    """Bytes that the forward and backward pass of one visit needs in addition to its parameters.

    The result is cached per model spec: the trials of a search have the same model.
    """
    model, data = engine.model, engine.data
    if not isinstance(model.factory, ModelSpec) or not isinstance(model.user_loss, str):
        return _find_activations(engine)
    shapes = (data.x.shape[1:], data.x.dtype, data.y.shape[1:], data.y.dtype, data.standardise)
    how = (engine.work.batch_size, engine.precision, engine.stacked, engine.deterministic)
    key = (model.factory.key, model.user_loss, shapes, how, model.device, model.dtype)
    if key not in _ACTIVATIONS:
        _ACTIVATIONS[key] = _find_activations(engine)
    return _ACTIVATIONS[key]


def _find_activations(engine: VectorEngine) -> int:
    device = engine.model.device
    # Two visits on a GPU, so that what is allocated once for all visits counts half. If two do not
    # fit, one is measured.
    for visits in (2, 1) if device.type == "cuda" else (1,):
        try:
            return _measure(engine, visits) if device.type == "cuda" else _estimate(engine)
        except OOM_ERRORS as error:
            if not out_of_memory(error):
                raise
            report = memory_report(error, device)
        torch.cuda.empty_cache()
    raise oom_error("One visit does", device, report, advise_smaller_visit())


def _measure(engine: VectorEngine, visits: int) -> int:
    """Peak memory of one gradient per visit, by the statistics of CUDA's caching allocator."""
    device, arguments = engine.model.device, _make_batch(engine, visits, engine.work.batch_size)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    engine.gradient(*arguments)
    return (torch.cuda.max_memory_allocated(device) - before) // visits


def _estimate(engine: VectorEngine) -> int:
    """Memory of one visit on a CPU, where the allocator keeps no statistics.

    Saved bytes grow linearly with the batch size: s(B) = a + b * B, where a are parameters that
    autograd saves. Two small batches give a and b, which is much cheaper than a full batch.
    """
    batch = engine.work.batch_size
    model = engine.model.clone_module()  # a module may change its own attributes in `forward`
    if engine.stacked:
        gradient = stacked_gradient(model, calls=engine.direct_calls)
    else:
        gradient = model.gradient_function(batched=False)
    if batch > 2 * _FEW:
        try:
            small, large = (_saved_bytes(engine, gradient, count) for count in (_FEW, 2 * _FEW))
            return small + max(0, large - small) * (batch - _FEW) // _FEW
        except Exception as error:  # a model may accept only one batch size
            if out_of_memory(error):
                raise
    try:
        return _saved_bytes(engine, gradient, batch)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        return _UNKNOWN  # torch.func transforms inside the model do not allow saved-tensor hooks


@num_threads(1)
def _saved_bytes(engine: VectorEngine, gradient: GradientFn, batch: int) -> int:
    """Bytes that autograd saves for the backward pass of one visit, plus those of live gradients.

    A pack hook of `saved_tensors_hooks` sees every saved tensor. The unpack hook is called first
    when the backward pass begins; it raises, because only the forward pass is needed.
    """
    arguments = _make_batch(engine, 1, batch)
    if not engine.stacked:  # vmap does not allow saved-tensor hooks: use a single visit without it
        arguments = tuple(values[0] for values in arguments)
    storages: dict[int, int] = {}  # bytes by address: views of one storage count once

    def pack(tensor: Tensor) -> Tensor:
        # Activation checkpointing saves tensors while the mode of the forward pass is active.
        with without_function_modes():
            if tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        raise _ForwardDone

    with suppress(_ForwardDone), saved_tensors_hooks(pack, unpack):
        gradient(*arguments)
    storages.pop(arguments[0].untyped_storage().data_ptr(), None)  # parameters: see _COPIES
    for value in engine.model.frozen.values():  # exist once, not once per visit
        storages.pop(value.untyped_storage().data_ptr(), None)
    return sum(storages.values()) + _LIVE_GRADS * max(storages.values(), default=0)


class _ForwardDone(Exception):  # noqa: N818 (not an error)
    """Raised when the backward pass begins, to stop it."""


def _make_batch(engine: VectorEngine, visits: int, batch: int) -> tuple[Tensor, ...]:
    """Arguments of a gradient function; the batches repeat the first examples of the data."""
    model, device = engine.model, engine.model.device
    weights = model.flatten_module(model.training_model)  # any weights will do
    theta, buffers = (tensor.repeat(visits, 1) for tensor in weights)
    index = torch.arange(visits * batch, device=device) % len(engine.data.x)
    x, y = engine.data.inputs(engine.data.x[index], model.dtype), engine.data.y[index]
    x, y = (values.reshape(visits, batch, *values.shape[1:]) for values in (x, y))
    y = y.to(model.dtype) if y.is_floating_point() else y
    weight = torch.ones(visits, batch, dtype=torch.bool, device=device)
    return theta, buffers, x, y, weight, torch.arange(visits, device=device)
