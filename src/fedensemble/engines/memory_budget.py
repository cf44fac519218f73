"""How many visits fit into memory at once, by trying two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .vector import VectorEngine

_COPIES = 10  # of a visit's weights alive at once: sent, point, gradient, slots, upload, memory and their new values
_GIB = 1 << 30
_ON_CPU = 4  # GiB
_OF_GPU = 0.6  # of what is free
_MOST = {"cpu": 64, "cuda": 4096}


def visits_that_fit(engine: VectorEngine, budget: float | None) -> int:
    """Visits at once for a budget in GiB; on a GPU what one needs is measured, on a CPU estimated from its weights."""
    learner, cuda = engine.learner, engine.learner.device.type == "cuda"
    weights = learner.theta_layout.total * learner.dtype.itemsize
    room = (budget if budget is not None else _ON_CPU) * _GIB
    needed = _COPIES * weights
    if cuda:
        if budget is None:
            room = _OF_GPU * torch.cuda.mem_get_info(learner.device)[0]
        needed += activations(engine)
    return int(max(1, min(_MOST["cuda" if cuda else "cpu"], room // needed)))


def activations(engine: VectorEngine) -> int:
    """Bytes one visit's forward and backward pass needs beside its weights, measured."""
    learner, batch = engine.learner, engine.work.batch_size
    theta, buffers = (tensor.repeat(2, 1) for tensor in learner.initial(0, 1))
    rows = torch.arange(2 * batch, device=learner.device) % len(engine.data.x)
    x, y = engine.data.inputs(engine.data.x[rows], learner.dtype), engine.data.y[rows]
    x, y = (values.reshape(2, batch, *values.shape[1:]) for values in (x, y))
    y = y.to(learner.dtype) if y.is_floating_point() else y
    torch.cuda.reset_peak_memory_stats(learner.device)
    before = torch.cuda.memory_allocated(learner.device)
    weight = torch.ones(2, batch, dtype=torch.bool, device=learner.device)
    engine.gradient(theta, buffers, x, y, weight, torch.arange(2, device=learner.device))
    return (torch.cuda.max_memory_allocated(learner.device) - before) // 2
