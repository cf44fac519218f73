"""How many visits fit into memory at once, by trying one or two."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...modeling.functional_model import GradientFn
from ...runtime.num_threads import num_threads
from ...runtime.oom import OOM_ERRORS, SMALLER_VISIT, format_gib, lack, oom_error, out_of_memory
from ..stacked.gradient import stacked_gradient

if TYPE_CHECKING:
    from .vector import VectorEngine

# of a visit's weights alive at once: sent, point, gradient, slots, upload, memory and their new
# values
_COPIES = 10
_GIB = 1 << 30
_ON_CPU = 4  # GiB
_OF_GPU = 0.6  # of what this process could have
_MOST = {"cpu": 64, "cuda": 4096}
_FEW = 2  # examples of a trial on a CPU, and twice as many: what a batch needs follows
_UNSEEN = _GIB  # bytes of a visit, where nothing is known
# of the largest tensor of a forward pass: those on both sides of an operation, and what it needs
# itself
_SLOPES = 3


def visits_that_fit(engine: VectorEngine, budget: float | None) -> int:
    """Visits at once for a budget in GiB, from what one needs: measured on a GPU, on a CPU from
    what autograd saves.

    If that is more than the budget, the engine's notes say so.
    """
    learner, cuda = engine.learner, engine.learner.device.type == "cuda"
    weights = learner.theta_layout.total * learner.dtype.itemsize
    most, needed = _MOST["cuda" if cuda else "cpu"], _COPIES * weights
    room = (budget if budget is not None else _ON_CPU) * _GIB
    if cuda and budget is None:
        room = _room_on_gpu(engine)
    if room >= needed:
        needed += activations(engine)
    if room < needed:
        engine.notes.append(
            f"One visit needs about {format_gib(needed)}, more than the memory budget of {format_gib(room)}: visits are trained one "
            "by one, and may take more than the budget."
        )
    visits = int(max(1, min(most, room // needed)))
    return _coarse(visits) if cuda else visits


def _room_on_gpu(engine: VectorEngine) -> float:
    """Bytes for a block: a part of the GPU's memory less what this process holds, so that every
    start finds the same.

    What is free at the start would differ with other programs, and with it blocks, the order of
    sums and the last bits of results. Only where others leave less than that part, what is free
    decides, and the engine's notes say so.
    """
    device = engine.learner.device
    free, total = torch.cuda.mem_get_info(device)
    held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    room, free = _OF_GPU * (total - held), free + reserved - held
    if room <= free:
        return room
    engine.notes.append(
        f"Other programs leave only {format_gib(free)} of the {format_gib(total)} of {device}: blocks are sized for that, and the "
        "last digits of results may differ from those on an idle GPU. To repeat them, set engine.options.block."
    )
    return _OF_GPU * free


def _coarse(visits: int) -> int:
    """A number of visits rounded down to three binary digits: what a visit needs is measured, and
    varies a little.

    >>> [_coarse(n) for n in (1, 7, 9, 100, 4096)]
    [1, 7, 8, 96, 4096]
    """
    step = 1 << max(0, visits.bit_length() - 3)
    return visits - visits % step


def activations(engine: VectorEngine) -> int:
    """Bytes one visit's forward and backward pass needs beside its weights."""
    device = engine.learner.device
    # two tell one's share of what all need once
    for visits in (2, 1) if device.type == "cuda" else (1,):
        try:
            return _measured(engine, visits) if device.type == "cuda" else _estimated(engine)
        except OOM_ERRORS as error:
            if not out_of_memory(error):
                raise
            lacking = lack(error, device)
        torch.cuda.empty_cache()
    raise oom_error("One visit does", device, lacking, SMALLER_VISIT)


def _measured(engine: VectorEngine, visits: int) -> int:
    """By what a GPU's allocator tells."""
    device, given = engine.learner.device, _batch(engine, visits, engine.work.batch_size)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    engine.gradient(*given)
    return (torch.cuda.max_memory_allocated(device) - before) // visits


def _estimated(engine: VectorEngine) -> int:
    """By what autograd saves for a few examples; weights that it saves do not grow with them."""
    batch = engine.work.batch_size
    learner = engine.learner.clone_module()  # what this one keeps in Python stays as it was
    # Layers apart: what oneDNN keeps in its own layout, nobody can look at.
    gradient = (
        stacked_gradient(learner) if engine.stacked else learner.gradient_function(batched=False)
    )
    if batch > 2 * _FEW:
        try:
            small, large = (_saved(engine, gradient, count) for count in (_FEW, 2 * _FEW))
            return small + max(0, large - small) * (batch - _FEW) // _FEW
        except Exception as error:  # a model may know one size only
            if out_of_memory(error):
                raise
    try:
        return _saved(engine, gradient, batch)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        return _UNSEEN  # torch.func inside a model lets nobody look


@num_threads(1)
def _saved(engine: VectorEngine, gradient: GradientFn, batch: int) -> int:
    """Bytes saved for one visit's backward pass, and those of slopes on their way; only the forward
    pass is done.
    """
    given = _batch(engine, 1, batch)
    if not engine.stacked:  # vmap lets nobody look
        given = tuple(values[0] for values in given)
    storages: dict[int, int] = {}

    def seen(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def stop(tensor: Tensor) -> Tensor:
        raise _EnoughError

    with suppress(_EnoughError), saved_tensors_hooks(seen, stop):
        gradient(*given)
    storages.pop(given[0].untyped_storage().data_ptr(), None)  # weights are counted already
    return sum(storages.values()) + _SLOPES * max(storages.values(), default=0)


class _EnoughError(Exception):
    """The backward pass begins: all that is saved has been seen."""


def _batch(engine: VectorEngine, visits: int, batch: int) -> tuple[Tensor, ...]:
    """Arguments of a gradient function: the first examples, over and over."""
    learner, device = engine.learner, engine.learner.device
    theta, buffers = (tensor.repeat(visits, 1) for tensor in learner.initial(0, 1))
    rows = torch.arange(visits * batch, device=device) % len(engine.data.x)
    x, y = engine.data.inputs(engine.data.x[rows], learner.dtype), engine.data.y[rows]
    x, y = (values.reshape(visits, batch, *values.shape[1:]) for values in (x, y))
    y = y.to(learner.dtype) if y.is_floating_point() else y
    weight = torch.ones(visits, batch, dtype=torch.bool, device=device)
    return theta, buffers, x, y, weight, torch.arange(visits, device=device)
